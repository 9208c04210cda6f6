"""Evaluation on held-out prompts, and samples as people read them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isnan

from spmd_rl.config.schema import Config
from spmd_rl.data.batch import Batch, Finish
from spmd_rl.graph.stage import Context
from spmd_rl.observe.evaluation import EvalResult, Outcome, gather_outcomes, summarize
from spmd_rl.observe.samples import SampleRecord
from spmd_rl.recipes.reward_model import judge
from spmd_rl.recipes.stages import draw, part_names, score, scored_columns

RECORDED = ("prompt", "row", "response", "reward", "reward_parts", "finish")  # what a sample record is made from


def evaluate(context: Context) -> tuple[list[EvalResult], list[SampleRecord]]:
    """Draw and score every held-out prompt; the results of all ranks, and this rank's samples.

    Collective: every replica takes its part of the prompts, and one small all-gather brings the outcomes together.
    """
    return results(context, answers(context))


def answers(context: Context) -> dict[str, Batch]:
    """This slot's part of the held-out prompts by source, answered and scored by the reward functions."""
    made = {}
    for source, batch in context.engines["loader"].eval_batches(context.own_slot, context.slots).items():
        drawn = batch.with_columns(draw(context, batch, purpose="eval"))
        scores = score(context, drawn).result(context.config.comm.stage_timeout_s)
        made[source] = drawn.with_columns(scored_columns(scores))
    return made


def results(context: Context, answered: Mapping[str, Batch]) -> tuple[list[EvalResult], list[SampleRecord]]:
    """What the answers of all ranks amount to, and this rank's as records. Collective; sources in one order."""
    config = context.config
    outcomes: list[Outcome] = []
    records: list[SampleRecord] = []
    for source, batch in answered.items():
        done = judge(context, batch)
        if context.replica == 0 and len(done):
            outcomes += _outcomes(config, source, done)
            records += sample_records(context, done, evaluation=True)
    return summarize(gather_outcomes(outcomes, context.world.control), config.eval.pass_at), records


def _outcomes(config: Config, source: str, batch: Batch) -> list[Outcome]:
    rewards = batch["reward"].as_scalars().tolist()
    prompts, lengths = batch.ids[:, 1].tolist(), batch["response"].lengths.tolist()
    return [
        Outcome(source, prompt, not isnan(reward) and reward >= config.eval.pass_threshold, reward, length)
        for prompt, reward, length in zip(prompts, rewards, lengths, strict=True)
    ]


def sample_records(context: Context, batch: Batch, evaluation: bool = False) -> list[SampleRecord]:
    """The samples of `batch` as text; it must hold the columns `RECORDED`."""
    decode = context.engines["tokenizer"].decode
    names = part_names(context.config)
    columns = zip(
        batch.ids.tolist(),
        batch["row"].row_bytes(),
        batch["prompt"].rows(),
        batch["response"].rows(),
        batch["reward"].as_scalars().tolist(),
        batch["reward_parts"].rows(),
        batch["finish"].as_scalars().tolist(),
        strict=True,
    )
    return [
        SampleRecord(
            step=context.step,
            id=tuple(identity),
            source=json.loads(row)["source"],
            prompt=decode(prompt.tolist(), skip_special_tokens=False),
            response=decode(response.tolist(), skip_special_tokens=True),
            reward=reward,
            reward_parts=dict(zip(names, parts.tolist(), strict=True)),
            finish=Finish(finish).name.lower(),
            tokens=len(response),
            eval=evaluation,
        )
        for identity, row, prompt, response, reward, parts, finish in columns
    ]
