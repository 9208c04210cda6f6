"""Dynamic sampling (DAPO, Yu et al. 2025, arXiv:2503.14476, section 3.2): a step of groups whose task rewards differ.

A group whose rewards are all equal has no advantage and teaches nothing. Rounds of `train.prompts_per_step` prompts are
drawn until so many groups with different rewards are there; the oldest are taken, and what is left over waits for the
next step, one version old then. Rewards are those of the task, before any shaping.

With mode=async each group is judged where it is drawn (`accept`), and the trainers go by the same rule
(data/stream/selection.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from math import inf

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_rl.algorithms.group_advantages import teaching
from spmd_rl.config.errors import UserError
from spmd_rl.data.batch import Batch, Column
from spmd_rl.data.surplus import CURSOR, Key, Surplus, choose, keys_of
from spmd_rl.graph.stage import BuildContext, Context
from spmd_rl.recipes import stages


class TooFewGroups(UserError):
    """Dynamic sampling gave up; every rank raises it. What was accepted waits in the engine `surplus`.

    accepted: this rank's accepted samples, for the record (none on a rank that repeats another's).
    """

    def __init__(self, message: str, accepted: Batch) -> None:
        super().__init__(message)
        self.accepted = accepted


def surplus(context: BuildContext) -> Surplus:
    """The builder of the engine that keeps accepted groups between steps."""
    slot, *within = context.mesh.get_coordinate() or ()
    return Surplus(slot, context.mesh.size(0), not any(within), context.world.control)


def experience(context: Context, _: Batch) -> Batch:
    """Prompts, responses and rewards of the groups of this step that lie on this slot.

    Metrics: `dynamic/rounds`; `dynamic/kept_fraction`, accepted of the groups drawn; `dynamic/waiting`, groups left for
    the next step; those of the stages rollout and reward are over all samples drawn. Where the prompts end first, the
    step has what is there. Raises TooFewGroups after `algorithm.dynamic_sampling_tries` rounds, on all ranks.
    """
    config, loader, waiting = context.config, context.engines["loader"], context.engines["surplus"]
    wanted, tries = config.train.prompts_per_step, config.algorithm.dynamic_sampling_tries
    held = waiting.take()
    seen = _Seen()
    keys = seen.add(context, held, keys_of(held))
    rounds = 0
    while len(keys) < wanted and rounds < tries and not loader.exhausted:
        rounds += 1
        batch, accepted = _round(context)
        found = seen.add(context, batch, [key for key, ok in zip(keys_of(batch), accepted, strict=True) if ok])
        keys += found
        held = Batch.concat([held, _those_in(set(found), batch)])
    places = choose(keys, wanted)
    if len(places) < wanted and not loader.exhausted:
        waiting.put(held, len(keys))
        raise TooFewGroups(
            f"dynamic sampling: after {rounds} rounds of {wanted} prompts, {len(keys)} of the {wanted} groups wanted "
            f"have rewards that differ; the rewards lie between {seen.least:g} and {seen.largest:g}. The accepted "
            "groups are in the checkpoint and in samples.jsonl; start again for further rounds. If it stays so, the "
            "task is too hard or too easy, the reward is constant, or train.samples_per_prompt is too small",
            held if context.replica == 0 else Batch.empty(),
        )
    waiting.put(_those_in(set(keys) - places.keys(), held), len(keys) - len(places))
    context.metrics.set("dynamic/rounds", rounds)
    context.metrics.set("dynamic/waiting", waiting.count)
    return _step_of(_those_in(places.keys(), held), places, config.train.updates_per_step)


def _round(context: Context) -> tuple[Batch, list[bool]]:
    """A round's samples on this slot, and whether each one's group is accepted."""
    loader = context.engines["loader"]
    place_of = loader.places(loader.position, context.slot, context.slots)
    batch = stages.prompts(context, Batch.empty())
    with context.watch("rollout"):
        batch = batch.with_columns(stages.rollout(context, batch))
    with context.watch("reward"):
        batch = batch.with_columns(stages.reward(context, batch).result())
    places = [place_of[number] for number in batch.ids[:, 1].tolist()]
    batch = batch.with_columns({CURSOR: Column.scalars(torch.tensor(places, dtype=torch.int64))})
    return batch, accept(context, batch)["accepted"].as_scalars().tolist()


def accept(context: Context, batch: Batch) -> Mapping[str, Column]:
    """Whether each sample's group has rewards that differ. With mode=async a replica sends only such groups whole."""
    teaching_G = teaching(stages.valid_rewards(context, batch), batch.groups())
    if context.replica == 0:
        context.metrics.mean("dynamic/kept_fraction", teaching_G.sum(), len(teaching_G))
    return {"accepted": Column.scalars(teaching_G[batch.groups()])}


def _those_in(groups: Set[Key], batch: Batch) -> Batch:
    inside = [i for i, key in enumerate(keys_of(batch)) if key in groups]
    return batch.select(torch.tensor(inside, dtype=torch.int64))


@dataclass
class _Seen:
    """What all ranks learn of a round: keys of accepted groups, and the range of the rewards."""

    least: float = inf
    largest: float = -inf

    def add(self, context: Context, batch: Batch, keys: list[Key]) -> list[Key]:
        """The accepted groups of all slots; `keys` of this slot may name one several times. Collective."""
        reward_S: Tensor = batch["reward"].as_scalars() if len(batch) else torch.empty(0)
        valid = reward_S[~reward_S.isnan()].tolist()
        mine = (sorted(set(keys)) if context.replica == 0 else [], min(valid, default=inf), max(valid, default=-inf))
        everyone: list[tuple[list[Key], float, float]] = [([], inf, -inf)] * context.world.size
        dist.all_gather_object(everyone, mine, group=context.world.control)
        self.least = min(self.least, *(low for _, low, _ in everyone))
        self.largest = max(self.largest, *(high for _, _, high in everyone))
        return [key for found, _, _ in everyone for key in found]


def _step_of(batch: Batch, places: dict[Key, int], updates: int) -> Batch:
    """By identity, as the stage `prompts` gives them; the updates of the step take turns by place."""
    keys = keys_of(batch)
    ids = batch.ids.tolist()
    order = sorted(range(len(ids)), key=ids.__getitem__)
    turns = torch.tensor([places[key] % updates for key in keys], dtype=torch.int32)
    batch = batch.with_columns({"turn": Column.scalars(turns)})
    columns = [name for name in batch.columns if name != CURSOR]
    return batch.only(columns).select(torch.tensor(order, dtype=torch.int64))
