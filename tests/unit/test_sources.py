from __future__ import annotations

import datetime
import gc
import json
import os
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

from spmd_rl.config.errors import UserError
from spmd_rl.config.schema import SourceConfig
from spmd_rl.data.sources import Sources, check_apart, row_bytes

SCRIPTS = [
    "漢字と仮名",
    "مرحبا بالعالم",
    "שלום",
    "😀👩‍👩‍👧‍👦",
    "e\u0301 ≠ é",
    "a\u2028b\u0085c\td",
    "नमस्ते",
    'quote " and \\',
]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def open_one(path="", **settings):
    return Sources.open([SourceConfig(name="one", path=str(path), **settings)], "data.train").parts[0]


def refusal(path="", **settings):
    with pytest.raises(UserError) as caught:
        source = open_one(path, **settings)
        for i in range(source.size):
            row_bytes(source.row(i), source.where(i))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """The same rows as JSON lines, parquet and Hugging Face data set."""
    import datasets
    import pyarrow
    import pyarrow.parquet

    folder = tmp_path_factory.mktemp("stored")
    rows = [{"prompt": text, "answer": i, "note": None} for i, text in enumerate(SCRIPTS)]
    table = pyarrow.table({name: [row[name] for row in rows] for name in rows[0]})
    pyarrow.parquet.write_table(table, folder / "rows.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(folder / "saved")
    datasets.DatasetDict(a=datasets.Dataset.from_list(rows)).save_to_disk(folder / "splits")
    write_lines(folder / "rows.jsonl", rows)
    return folder


@pytest.mark.parametrize("kind", ["rows.jsonl", "rows.parquet", "saved"])
def test_every_script_survives_byte_for_byte(stored, kind, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    source = open_one(stored / kind)
    for i in reversed(range(len(SCRIPTS))):
        data = row_bytes(source.row(i), source.where(i))
        assert SCRIPTS[i] in json.loads(data)["prompt"]
        assert json.dumps(SCRIPTS[i], ensure_ascii=False).encode() in data
        assert json.loads(data) == {"prompt": SCRIPTS[i], "answer": i, "note": None, "source": "one"}


def test_a_saved_data_set_of_many_batches_and_files(tmp_path):
    """40,000 record batches, empty ones among them: as `datasets` reads it, in a tenth of the memory."""
    import datasets
    import pyarrow

    rows = [{"prompt": f"row {i}", "level": i % 7} for i in range(150_000)]
    table = pyarrow.Table.from_pylist(rows)
    datasets.Dataset(table).save_to_disk(tmp_path, num_shards=3)
    first = 0
    for file in sorted(tmp_path.glob("*.arrow")):  # the same files, with other batches
        size = len(datasets.Dataset.from_file(str(file)))
        with pyarrow.ipc.new_stream(file, table.schema) as out:
            for begin in range(first, first + size, 4):
                out.write_table(table.slice(begin, min(4, first + size - begin)))
                if begin % 1000 == 0:
                    out.write_batch(pyarrow.RecordBatch.from_pylist([], table.schema))
        first += size
    open_one(tmp_path)
    before = anonymous_mib()
    source = open_one(tmp_path)
    grown = anonymous_mib() - before
    theirs = datasets.load_from_disk(str(tmp_path))
    assert anonymous_mib() - before - grown > 20 > 2 * grown
    assert source.size == len(theirs) == 150_000 and source.table.columns() == theirs.column_names
    for i in [*range(0, 150_000, 4999), 3, 4, 49_999, 50_000, 50_001, 99_999, 100_000, 149_999]:
        assert source.table.row(i) == theirs[i] == rows[i]
    with pytest.raises(IndexError):
        source.table.row(150_000)
    file.write_bytes(file.read_bytes()[:-1000])
    assert "a damaged Arrow stream" in refusal(tmp_path)


def anonymous_mib() -> float:
    """Memory of this process that is no file's."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) / 1024


def test_columns_with_dictionaries_are_read_too(tmp_path):
    import datasets
    import pyarrow

    values = ["a", "b", "a", "c"]
    datasets.Dataset(pyarrow.table({"prompt": values, "kind": pyarrow.array(values).dictionary_encode()})).save_to_disk(
        tmp_path
    )
    source = open_one(tmp_path)
    assert [source.row(i)["kind"] for i in range(4)] == values


@pytest.mark.parametrize("kind", ["rows.jsonl", "saved"])
def test_rows_stay_in_the_file(tmp_path, kind):
    """12 MB of rows are mapped, not loaded: neither opening nor reading some of them keeps them in memory."""
    import datasets
    import pyarrow

    text = [f"{i} " + "x" * 400 for i in range(30_000)]
    if kind == "saved":
        datasets.Dataset(pyarrow.table({"prompt": text})).save_to_disk(tmp_path / kind)
    else:
        write_lines(tmp_path / kind, [{"prompt": line} for line in text])
    open_one(tmp_path / kind).row(0)  # imports
    gc.collect()
    arrow = pyarrow.total_allocated_bytes()
    tracemalloc.start()
    source = open_one(tmp_path / kind)
    assert source.size == 30_000 and all(source.row(i)["prompt"] == text[i] for i in range(0, 30_000, 500))
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 1e6 and pyarrow.total_allocated_bytes() - arrow < 1e6


def test_lines_of_all_shapes_are_found(tmp_path):
    """Byte order mark, Windows line ends, empty lines, no end at the end; rows far behind the index's stride."""
    path = tmp_path / "x.jsonl"
    lines = [json.dumps({"prompt": f"p{i}", "answer": i}) for i in range(300)]
    lines[100:100] = ["", "\r", ""]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines[:50]).encode() + b"\n" + "\n".join(lines[50:]).encode())
    source = open_one(path)
    assert source.size == 300
    assert [source.row(i)["answer"] for i in range(300)] == list(range(300))
    assert source.where(99).endswith("x.jsonl:100") and source.where(100).endswith("x.jsonl:104")


@pytest.mark.parametrize("block", [1, 7, 64, 1000])
def test_index_does_not_depend_on_its_block(tmp_path, monkeypatch, block):
    path = tmp_path / "x.jsonl"
    rows = [{"prompt": "x" * (i % 13), "answer": i} for i in range(200)]
    path.write_text("\n\n".join(json.dumps(row) for row in rows))
    monkeypatch.setattr("spmd_rl.data.jsonl.BLOCK", block)
    source = open_one(path)
    assert [source.row(i)["answer"] for i in range(source.size)] == list(range(200))
    assert source.where(199).endswith(":399")


def test_broken_lines_are_named(tmp_path):
    path = tmp_path / "x.jsonl"
    good = '{"prompt": "a"}\n'
    path.write_text(good * 69 + '{"prompt": "a\n' + good)
    assert f"{path}:70: broken JSON" in refusal(path)
    path.write_text(good + "\n[1]\n")
    assert f"{path}:3: a JSON object is wanted, not list" in refusal(path)
    path.write_bytes(good.encode() + b'{"prompt": "\xff"}')
    assert f"{path}:2: not UTF-8 (byte 13 of the line)" in refusal(path)
    path.write_text(good + '{"promt": "a"}\n')
    assert f"{path}:2: no column 'prompt'; there are promt" in refusal(path)
    path.write_text(good + '{"prompt": "\\ud83d"}\n')
    assert f"{path}:2: half of a surrogate pair" in refusal(path)


def test_what_is_not_there_is_said_in_one_line(stored, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "blank.jsonl").write_text("\n\n")
    (tmp_path / "not.parquet").write_text("no")
    (tmp_path / "x.csv").write_text("a,b")
    assert f"data.train[0] (one): no file or folder {tmp_path}/none.jsonl" in refusal(tmp_path / "none.jsonl")
    assert "the file is empty" in refusal(tmp_path / "empty.jsonl")
    assert "no line holds anything" in refusal(tmp_path / "blank.jsonl")
    assert "not a readable parquet file" in refusal(tmp_path / "not.parquet")
    assert "is neither *.jsonl" in refusal(tmp_path / "x.csv")
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert "is neither a file nor a folder" in refusal(tmp_path / "pipe.jsonl")
    for state in ("{", "[]"):
        (tmp_path / "state.json").write_text(state)
        assert "not a folder made by datasets.save_to_disk" in refusal(tmp_path)
    (tmp_path / "state.json").unlink()
    assert "not a folder made by datasets.save_to_disk" in refusal(tmp_path)
    assert "several splits; name one of them" in refusal(stored / "splits") and "splits/a" in refusal(stored / "splits")
    assert "exactly one of path and generator" in refusal()
    assert "lacks the place {prompt}" in refusal(stored / "saved", prompt_template="no place")
    assert "weight=0" in refusal(stored / "saved", weight=0)
    for kind in ("rows.jsonl", "rows.parquet", "saved"):
        message = refusal(stored / kind, prompt_column="question")
        assert "no column 'question'" in message and "there are prompt, answer, note" in message
        assert "no column 'label'" in refusal(stored / kind, answer_column="label")


def test_empty_data_sets(tmp_path):
    import datasets
    import pyarrow
    import pyarrow.parquet

    empty = pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())})
    pyarrow.parquet.write_table(empty, tmp_path / "x.parquet")
    datasets.Dataset(empty).save_to_disk(tmp_path / "saved")
    assert "the data set is empty" in refusal(tmp_path / "x.parquet")
    assert "the data set is empty" in refusal(tmp_path / "saved")


def test_values_that_json_lacks(tmp_path):
    import datasets

    day = datetime.datetime(2024, 2, 29, 12)
    datasets.Dataset.from_list([{"prompt": "a", "when": day}]).save_to_disk(tmp_path / "dates")
    source = open_one(tmp_path / "dates")
    assert json.loads(row_bytes(source.row(0), ""))["when"] == "2024-02-29T12:00:00"
    datasets.Dataset.from_list([{"prompt": "a", "image": b"\x89PNG"}]).save_to_disk(tmp_path / "bytes")
    assert "row 0: column 'image' holds bytes, which JSON can't hold" in refusal(tmp_path / "bytes")


def test_named_columns_and_first_rows(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", [{"q": f"q{i}", "final": i, "answer": "long"} for i in range(9)])
    source = open_one(path, prompt_column="q", answer_column="final", size=4)
    assert source.size == 4
    assert source.row(3) == {"q": "q3", "final": 3, "answer": 3, "source": "one"}


def test_several_sources_are_one_sequence(tmp_path):
    configs = [
        SourceConfig(
            name=name, path=write_lines(tmp_path / f"{name}.jsonl", [{"prompt": f"{name}{i}"} for i in range(n)])
        )
        for name, n in (("a", 3), ("b", 1), ("c", 2))
    ]
    sources = Sources.open(configs, "data.train")
    rows = [part.row(i) for part, i in map(sources.locate, range(len(sources)))]
    assert [r["prompt"] for r in rows] == ["a0", "a1", "a2", "b0", "c0", "c1"]
    assert [r["source"] for r in rows] == ["a", "a", "a", "b", "c", "c"]
    for outside in (-1, 6):
        with pytest.raises(IndexError):
            sources.locate(outside)


def test_generator_rows_are_the_task_s_own():
    from reasoning_gym.factory import create_dataset

    params = {"max_terms": 3, "max_digits": 2}
    source = open_one(generator="chain_sum", params=params, size=50, seed=11)
    entry = create_dataset("chain_sum", seed=11, size=50, **params)[17]
    row = source.row(17)
    assert row["question"] == entry["question"] and row["answer"] == entry["answer"]
    assert row["metadata"]["source_dataset"] == "chain_sum"
    assert row["generator"] == {"task": "chain_sum", "params": params} and row["source"] == "one"
    assert source.prompt_column == "question"


def test_bad_generators():
    assert "no such reasoning-gym task; did you mean 'chain_sum'?" in refusal(generator="chainsum", size=5)
    assert "no parameter 'max_term'; did you mean 'max_terms'?" in refusal(
        generator="chain_sum", size=5, params={"max_term": 3}
    )
    assert "max_terms must be >= min_terms" in refusal(generator="chain_sum", size=5, params={"max_terms": 1})
    assert "size=0; the number of rows" in refusal(generator="chain_sum")
    assert "seed belongs beside params" in refusal(generator="chain_sum", size=5, params={"seed": 1})
    assert "refuses its parameters" in refusal(generator="chain_sum", size=5, params={"max_terms": "many"})
    assert "start with PYTHONHASHSEED=0" in refusal(generator="word_ladder", size=5)


def test_evaluation_rows_must_not_be_trained_on():
    train = SourceConfig(name="t", generator="chain_sum", size=1000, seed=5)
    apart = replace(train, name="e", seed=1005)
    check_apart([train], [apart, replace(train, params={"max_terms": 3}), replace(train, generator="gcd")])
    for seed in (5, 6, 1004):
        with pytest.raises(UserError, match=r"data.eval\[0\] \(e\): shares rows .* set its seed to 1005 or more"):
            check_apart([train], [replace(apart, seed=seed)])
