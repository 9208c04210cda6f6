"""ReMax's stages on a tiny model: what the greedy response is, what it is worth, and where it must not count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from spmd_rl.comm.world import World
from spmd_rl.config.load import load_config
from spmd_rl.data.batch import Batch, Column
from spmd_rl.engines.reward.pool import RewardPool
from spmd_rl.engines.rollout.desk import Desk
from spmd_rl.engines.rollout.transformers_engine import TransformersEngine
from spmd_rl.graph.stage import Context
from spmd_rl.observe.metrics import Metrics
from spmd_rl.recipes import remax, stages
from tests.integration.program import tiny_config
from tests.tiny_model import make_tiny_model

PROMPTS = ("one", "two, which is longer", "three")
SAMPLES = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def context_of(folder: Path, model: Path, *overrides: str) -> Context:
    """A context without a world, which none of these stages needs; the reward is what the row says, or the length."""
    (folder / "own.py").write_text(
        "def own(prompt, response, row):\n"
        "    return float('nan') if row['source'] == row.get('bad') else len(response) + 0.5\n"
    )
    settings = ["algorithm.advantage=remax", f"train.samples_per_prompt={SAMPLES}", *overrides]
    path = tiny_config(
        folder, model, reward={"functions": [{"function": f"{folder / 'own.py'}:own"}], "workers": 0,
                               "on_error": "exclude"},
    )  # fmt: skip
    config = load_config(path, settings)
    tokenizer = AutoTokenizer.from_pretrained(model)
    engine = TransformersEngine(str(model), tokenizer, frozenset({2}), 64, 64)
    engines = {"tokenizer": tokenizer, "rollout": engine, "desk": Desk(engine), "reward": RewardPool(config.reward)}
    return Context(config, cast(World, None), engines, 1, Metrics(), slot=0, slots=1, replica=0)


def prompts_of(context: Context, bad: str = "") -> Batch:
    """Samples in no order, as a custom graph might hand them over; the group of the source `bad` cannot be scored."""
    encode = context.engines["tokenizer"].encode
    ids = [(0, 10 * number, sample) for sample in range(SAMPLES) for number in reversed(range(len(PROMPTS)))]
    rows = [{"source": PROMPTS[number // 10], "bad": bad} for _, number, _ in ids]
    return Batch(
        torch.tensor(ids),
        {
            "prompt": Column.from_rows([torch.tensor(encode(row["source"]), dtype=torch.int32) for row in rows]),
            "row": Column.from_bytes([json.dumps(row).encode() for row in rows]),
        },
    )


def greedy_texts(context: Context, model: Path) -> dict[str, tuple[str, int]]:
    """By transformers' own generation: text and number of tokens."""
    reference, tokenizer = AutoModelForCausalLM.from_pretrained(model).eval(), context.engines["tokenizer"]
    found = {}
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt)])
        most = context.config.rollout.max_tokens
        out = reference.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=most)
        found[prompt] = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True), out.shape[1] - ids.shape[1]
    return found


def through(context: Context, batch: Batch, streaming: bool = False) -> Batch:
    """Rollout, reward and the baseline's reward."""
    if streaming:
        pending = remax.stream_rollout(context, batch)
        while not pending.done():
            context.engines["desk"].step()
        batch = batch.with_columns(pending.result())
    else:
        batch = batch.with_columns(remax.rollout(context, batch))
    batch = batch.with_columns(stages.reward(context, batch).result())
    greedy: Any = remax.greedy_reward(context, batch)
    return batch.with_columns(greedy.result())


@pytest.mark.parametrize("streaming", [False, True], ids=["together", "group by group"])
def test_each_sample_has_the_reward_of_its_own_prompts_greedy_response(tmp_path, model, streaming):
    context = context_of(tmp_path, model)
    batch = through(context, prompts_of(context), streaming)
    wanted, decode = greedy_texts(context, model), context.engines["tokenizer"].decode
    rows = [json.loads(row)["source"] for row in batch["row"].row_bytes()]
    for prompt, tokens, greedy in zip(
        rows, batch["greedy_response"].rows(), batch["greedy_reward"].as_scalars(), strict=True
    ):
        assert decode(tokens.tolist(), skip_special_tokens=True) == wanted[prompt][0]
        assert float(greedy) == len(wanted[prompt][0]) + 0.5


def test_samples_and_their_metrics_are_those_of_a_run_without_it(tmp_path, model):
    plain, with_greedy = context_of(tmp_path, model), context_of(tmp_path, model)
    batch = prompts_of(plain).with_columns(stages.rollout(plain, prompts_of(plain)))
    stages.reward(plain, batch).result()
    found = through(with_greedy, prompts_of(with_greedy))
    # the greedy responses share the engine's batches, which changes the rounding of a log-probability, never a token
    for name, column in batch.columns.items():
        rounding = {"rtol": 1e-5, "atol": 1e-5} if column.values.is_floating_point() else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(found[name].values, column.values, **rounding)
    ours, theirs = with_greedy.metrics.reduce(), plain.metrics.reduce()
    assert {name: ours[name] for name in theirs} == pytest.approx(theirs, rel=1e-5)
    assert ours.keys() - theirs.keys() == {"reward/greedy_mean", "tokens/greedy"}
    lengths = [tokens for _, tokens in greedy_texts(plain, model).values()]
    assert ours["tokens/greedy"] == sum(lengths)


def test_advantages_by_hand_and_a_group_without_its_baseline(tmp_path, model):
    context = context_of(tmp_path, model, "algorithm.overlong_buffer=6", "algorithm.overlong_penalty=4.0")
    batch = through(context, prompts_of(context, bad="three"))
    advantage = stages.advantage(context, batch)
    greedy = greedy_texts(context, model)
    texts = [
        context.engines["tokenizer"].decode(row.tolist(), skip_special_tokens=True) for row in batch["response"].rows()
    ]
    most = context.config.rollout.max_tokens
    for place, (prompt, text) in enumerate(
        zip([json.loads(row)["source"] for row in batch["row"].row_bytes()], texts, strict=True)
    ):
        values, mask = advantage["advantage"].rows()[place], advantage["loss_mask"].rows()[place]
        if prompt == "three":
            assert bool((values == 0).all()) and not bool(mask.any())
            continue

        def worth(text: str, tokens: int) -> float:  # 6 of 12 tokens are free, the penalty grows to 4
            return len(text) + 0.5 - 4 * max(0.0, (tokens - (most - 6)) / 6)

        wanted = worth(text, len(batch["response"].rows()[place])) - worth(*greedy[prompt])
        assert values.tolist() == pytest.approx([wanted] * len(values), rel=1e-5, abs=1e-5) and bool(mask.all())
