"""Asynchronous training (`mode: async`): some ranks draw, others train; who does what, and how they meet."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from spmd_rl.comm.bootstrap import bootstrap_roles, shutdown
from spmd_rl.comm.digest import agree
from spmd_rl.comm.liveness import Liveness
from spmd_rl.comm.placement import detect
from spmd_rl.comm.stop import StopFlag
from spmd_rl.comm.world import World
from spmd_rl.config.check import check_world
from spmd_rl.config.errors import UserError
from spmd_rl.config.load import to_yaml
from spmd_rl.config.schema import Config
from spmd_rl.data.stream.admission import Frontier
from spmd_rl.data.stream.rounds import Rounds
from spmd_rl.data.stream.window import Window
from spmd_rl.graph.graph import ResolvedGraph, declare, resolve
from spmd_rl.graph.plan import make_plan
from spmd_rl.graph.roles import TRAIN, Halves, Roles, cut, roles_of
from spmd_rl.recipes.contract import check_contract
from spmd_rl.recipes.evaluate import RECORDED


@dataclass(frozen=True)
class Cast:
    """Who plays what, the same on all ranks. graphs: of each role, resolved in the role's own numbers."""

    roles: Roles
    halves: Halves
    train: ResolvedGraph
    rollout: ResolvedGraph

    @property
    def replicas(self) -> list[list[int]]:
        """The ranks of the job that make up each rollout replica, its head first."""
        layout = self.rollout.placements["rollout"].layout
        return [[self.roles.rollout[rank] for rank in layout.group(slot)] for slot in range(layout.slots)]

    def home(self, replica: int) -> int:
        """The trainer (its place among the trainers) that takes in what a replica makes."""
        return replica % len(self.roles.train)


@dataclass(frozen=True)
class Start:
    """What both sides know when training begins. done: steps in the checkpoint that the run goes on from."""

    window: Window
    done: int
    frontier: Frontier


def cast(config: Config, size: int) -> Cast:
    """Roles and graphs for a job of `size` ranks. Pure; raises UserError for everything that does not fit."""
    roles = roles_of(config, size)
    if roles is None:
        raise UserError("mode=async is wanted here")
    check_world(config, len(roles.rollout))
    declared = declare(config, size)
    check_contract(declared, config.mode)
    halves = cut(declared, roles, RECORDED)
    made = Cast(roles, halves, resolve(halves.train, len(roles.train)), resolve(halves.rollout, len(roles.rollout)))
    unplaced = [name for name in ("rollout", "prompts") if name not in made.rollout.placements]
    if unplaced:
        raise UserError(f"stage {unplaced[0]!r} is placed on ranks that train; with mode=async it must draw")
    if config.stream.tolerate_replica_loss and len(made.replicas) < 2:
        raise UserError("stream.tolerate_replica_loss=true: there is one replica, and nobody to take over from it")
    return made


def run_async(config: Config) -> int:
    """Run the whole job on this rank; the exit status."""
    from spmd_rl.job_replica import Replica
    from spmd_rl.job_trainer import TrainerJob

    with StopFlag() as stop:
        made = cast(config, detect(os.environ).size)
        job, mine = bootstrap_roles(config.comm, config.run.threads, made.roles.as_mapping())
        with Liveness(job, config.comm) as watch:
            with watch.stage("start", 0):
                plans = make_plan(made.train).digest + make_plan(made.rollout).digest
                agree(job, "the configuration or the plan", to_yaml(config).encode() + plans)
            with ExitStack() as opened, watch.announcing():
                if mine.role == TRAIN:
                    TrainerJob(config, job, mine, made, watch, stop, opened).run()
                else:
                    Replica(config, job, mine, made, watch, stop, opened).run()
        if not watch.lost:  # else each leaves when it is done
            shutdown(job)
    return 0


def share(job: World, limit_s: float, **facts: Any) -> dict[str, Any]:
    """What some ranks bring all ranks know. Collective over the job, within `limit_s`: others may still build engines.

    Raises RuntimeError where two bring different, TimeoutError.
    """
    try:
        job.control.barrier(timeout=timedelta(seconds=limit_s)).wait()
    except RuntimeError as error:
        raise TimeoutError(f"not all ranks of the job have met within {limit_s:g} s ({error})") from None
    everything: list[Any] = [None] * job.size
    dist.all_gather_object(everything, facts, group=job.control)
    known: dict[str, Any] = {}
    for one in everything:
        for name, value in one.items():
            if known.setdefault(name, value) != value:
                raise RuntimeError(f"the ranks start with different {name}: {known[name]!r} and {value!r}")
    return known


def meet(job: World, config: Config, **facts: Any) -> Start:
    """Trainers bring `done` and `frontier`, replicas `epoch_length`."""
    known = share(job, config.comm.stage_timeout_s, **facts)
    steps, stream = config.train.steps, config.stream
    if config.algorithm.dynamic_sampling:
        steps *= config.algorithm.dynamic_sampling_tries  # rounds that are drawn at most
    rounds = Rounds(known["epoch_length"], config.train.prompts_per_step, steps, config.data.epochs)
    window = Window(rounds, stream.staleness, stream.surplus, waits=stream.on_stale == "wait")
    return Start(window, known["done"], known["frontier"])
