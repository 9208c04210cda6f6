"""What it costs to start on 100 million stored rows: CPU time, and memory that is no file's.

    .venv/bin/python perf/loader.py --check

Writes a data set of one-letter prompts (520 MB, as `datasets.save_to_disk` does) to a temporary folder, opens it in a
fresh process, and draws two steps of 64 prompts, one of them in the middle of the fourth epoch. One JSON object and a
line; `--check` exits with 1 above 1 s of CPU time or 50 MiB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # when run as a script, from a checkout that is not installed

from spmd_rl.config.schema import Config, DataConfig, SourceConfig, TrainConfig  # noqa: E402
from spmd_rl.data.loader import PromptLoader  # noqa: E402
from tests.tiny_model import make_tiny_tokenizer  # noqa: E402

LIMIT_S, LIMIT_MIB = 1.0, 50.0


def make(folder: Path, rows: int) -> None:
    """Prompts "a", "b", …: straight from memory, no Python object per row."""
    import datasets

    letters = (np.arange(rows) % 26 + ord("a")).astype(np.uint8)
    starts = pyarrow.py_buffer(np.arange(rows + 1, dtype=np.int32))
    column = pyarrow.StringArray.from_buffers(rows, starts, pyarrow.py_buffer(letters))
    datasets.disable_progress_bars()
    datasets.Dataset(pyarrow.table({"prompt": column})).save_to_disk(folder, num_shards=1)


def loader(folder: Path) -> PromptLoader:
    data = DataConfig(train=[SourceConfig(name="letters", path=str(folder))], chat_template=False)
    train = TrainConfig(prompts_per_step=64, samples_per_prompt=8)
    return PromptLoader(Config(data=data, train=train), make_tiny_tokenizer())


def anonymous_mib() -> float:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) / 1024


def measure(few: Path, many: Path) -> None:
    """Prints what opening `many` costs after `few` was opened, which imports everything."""
    loader(few).batch(0, 1)
    memory, wall, cpu = anonymous_mib(), time.perf_counter(), time.process_time()
    opened = loader(many)
    opened.batch(0, 1)
    opened.load_state_dict({"epoch": 3, "cursor": opened.epoch_length // 2, "epoch_length": opened.epoch_length})
    opened.batch(0, 1)
    cost = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu, "mib": anonymous_mib() - memory}
    print(json.dumps({"rows": opened.epoch_length, **cost}))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=100_000_000)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--measure", nargs=2, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(*arguments.measure)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        few, many = Path(folder) / "few", Path(folder) / "many"
        make(few, 10)
        make(many, arguments.rows)
        command = [sys.executable, __file__, "--measure", str(few), str(many)]
        line = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found = json.loads(line)
    print(line.strip())
    print(
        f"{found['rows']:,} rows: {found['wall_s']:.2f} s, {found['cpu_s']:.2f} s of CPU time, {found['mib']:.1f} MiB"
    )
    return int(arguments.check and (found["cpu_s"] > LIMIT_S or found["mib"] > LIMIT_MIB))


if __name__ == "__main__":
    sys.exit(main())
