"""The loader on real ranks: shares of the screening, agreement, errors on every rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from spmd_rl.config.errors import UserError
from spmd_rl.config.schema import Config, DataConfig, SourceConfig, TrainConfig
from spmd_rl.data.loader import PromptLoader
from tests.tiny_model import make_tiny_tokenizer
from tests.world.harness import run_world

LIMIT = 20


def make_loader(world, path, curriculum=""):
    data = DataConfig(
        train=[SourceConfig(name="a", path=path)], max_prompt_tokens=LIMIT, chat_template=False, curriculum=curriculum
    )
    return PromptLoader(
        Config(data=data, train=TrainConfig(prompts_per_step=5, samples_per_prompt=1)), make_tiny_tokenizer(), world
    )


def load(world: Any, path: str, curriculum: str = "") -> dict[str, Any]:
    """Prompt indices of this rank's slot in the first epoch and the next; or the error."""
    read: set[int] = set()
    try:
        loader = make_loader(world, path, curriculum)
    except UserError as error:
        return {"error": str(error)}
    tokenise = loader._read

    def watched(rows, prompts):
        read.update(prompts)
        return tokenise(rows, prompts)

    loader._read = watched
    steps = []
    while loader.position.epoch < 2:
        steps.append([i[1] for i in loader.batch(world.rank, world.size).ids.tolist()])
    loader.close()
    return {"steps": steps, "read": sorted(read), "epoch_length": loader.epoch_length}


def joined(ranks: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Each step's prompts over all ranks."""
    return [sum(parts, []) for parts in zip(*(r["steps"] for r in ranks), strict=True)]


def load_all(world, plain, broken):
    return [load(world, plain), load(world, plain, curriculum="level"), load(world, broken)]


def test_ranks_agree_though_each_checks_a_share(tmp_path):
    """D4. Overlong prompts lie in the last third only: ranks that filtered for themselves would differ in count."""
    rows = [{"prompt": "x" * (LIMIT + 1 if i >= 20 and i % 2 else LIMIT), "level": -i} for i in range(30)]
    plain, broken = tmp_path / "plain.jsonl", tmp_path / "broken.jsonl"
    plain.write_text("".join(json.dumps(row) + "\n" for row in rows))
    broken.write_text(plain.read_text() + '{"prompt": \n')
    usable = [i for i in range(30) if i < 20 or i % 2 == 0]
    alone = load(SimpleNamespace(rank=0, size=1, control=None), str(plain))

    result = run_world(load_all, ranks=3, timeout_s=150, args={"plain": str(plain), "broken": str(broken)}).check()
    shuffled, curriculum, refused = zip(*result.ranks, strict=True)

    assert [r["epoch_length"] for r in shuffled] == [25] * 3
    steps = joined(shuffled)
    assert steps == alone["steps"] and [len(s) for s in steps] == [5] * 10
    assert sorted(sum(steps[:5], [])) == sorted(sum(steps[5:], [])) == usable
    for rank in shuffled:  # nobody else's rows are read, but for the step made ahead
        assert len(set(rank["read"]) - set(sum(rank["steps"], []))) <= 2

    steps = joined(curriculum)
    assert sum(steps[:5], []) == usable[::-1]

    assert {r["error"] for r in refused} == {f"{broken}:31: broken JSON (Expecting value, column 12)"}
