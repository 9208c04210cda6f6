"""A rollout replica of an asynchronous job: draws group after group, as far ahead of the trainers as it may."""

from __future__ import annotations

import time
import traceback
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmd_rl.comm.liveness import Liveness
from spmd_rl.comm.roles import group_of
from spmd_rl.comm.stop import StopFlag
from spmd_rl.comm.world import World
from spmd_rl.config.errors import UserError
from spmd_rl.config.schema import Config
from spmd_rl.data.batch import Batch
from spmd_rl.data.loader import Position, PromptLoader
from spmd_rl.data.stream.admission import Starts
from spmd_rl.data.stream.channel import Bell, open_ends
from spmd_rl.data.stream.producer import Producer
from spmd_rl.data.stream.selection import SelectingStarts
from spmd_rl.engines.protocol import EngineFailure
from spmd_rl.engines.rollout.desk import Slip
from spmd_rl.engines.rollout.lead import Lead, follow
from spmd_rl.engines.rollout.long_rounds import LongRounds
from spmd_rl.graph.groups import GroupRun
from spmd_rl.graph.roles import ACCEPTED
from spmd_rl.graph.stage import BuildContext, Context
from spmd_rl.job_async import Cast, Start, meet, share
from spmd_rl.job_loss import Loss
from spmd_rl.observe.metrics import Metrics
from spmd_rl.observe.spans import Spans
from spmd_rl.observe.timeline import rank_file
from spmd_rl.recipes.evaluate import answers
from spmd_rl.weights.receive import Receiver

_STRETCH_S = 1.0  # of one kind of work, between two words to the failure detection
_NAP_S = 0.005  # where there is nothing to do but to wait for weights, room or rewards


@dataclass
class _Running:
    run: GroupRun
    began: float

    def slips(self) -> list[Slip]:
        """Of its responses that are not all there."""
        slips = (getattr(deferred, "slip", None) for deferred in self.run.waiting)
        return [slip for slip in slips if isinstance(slip, Slip) and not slip.done()]


@dataclass(frozen=True)
class _At:
    """The loader as the stage `prompts` wants it, at the round of one group."""

    loader: PromptLoader
    position: Position

    def batch(self, slot: int, slots: int) -> Batch:
        return self.loader.batch_at(self.position, slot, slots)


class Replica:
    """job: the world of all ranks; mine: that of the replicas. Made and run collectively over the replicas.

    Of a replica of several ranks the first one, its head, does all of this; the others repeat what its engine does.
    """

    def __init__(
        self, config: Config, job: World, mine: World, made: Cast, watch: Liveness, stop: StopFlag, opened: ExitStack
    ) -> None:
        self.config, self.job, self.world, self.cast, self.watch, self.stop = config, job, mine, made, watch, stop
        self.engines: dict[str, Any] = {}
        self.loss = Loss(config, job, watch, made.roles.rollout)
        with watch.stage("start", 0):  # the trainers claim the run folder first
            self.over = share(job, config.comm.stage_timeout_s)["over"]
        if self.over:
            return
        file = rank_file(Path(config.run.folder), len(made.roles.train) + mine.rank)
        self.spans = Spans(job.rank, file if config.observe.timeline else None, config.observe.nvtx)
        opened.callback(self.spans.flush)
        for spec in made.rollout.engines:
            placed = made.rollout.engine_placements[spec.name]
            with watch.stage(f"build {spec.name}", 0), self.spans(f"build_{spec.name}"):
                mesh = mine.mesh(placed.ranks, placed.axes)
                if mine.rank in placed.ranks:
                    self.engines[spec.name] = spec.build(BuildContext(config, mine, mesh, self.engines))
                    if hasattr(self.engines[spec.name], "close"):
                        opened.callback(self.loss.close, self.engines[spec.name])
                if spec.name == "rollout":
                    self._form_replica()
        self.desk = self.engines["desk"]
        self.version = 0
        self._running: dict[int, _Running] = {}
        self._next: tuple[int, GroupRun] | None = None  # read, but without room so far

    def _form_replica(self) -> None:
        """The engine is there: let the head of each replica lead it, and know the other heads."""
        engine, replicas = self.engines["rollout"], self.cast.replicas
        stream, name = self.config.stream, type(engine).__name__
        if stream.swap == "in_flight" and not hasattr(engine, "abort"):
            raise UserError(f"stream.swap=in_flight: {name} cannot take weights while it draws; set between_groups")
        if stream.tail_tokens and not hasattr(engine, "abort"):
            raise UserError(f"stream.tail_tokens={stream.tail_tokens}: {name} cannot put responses aside; set 0")
        self.number = next(number for number, ranks in enumerate(replicas) if self.job.rank in ranks)
        self._group = group_of(self.world, replicas, self.config.comm.stage_timeout_s)
        self._is_head = self.job.rank == replicas[self.number][0]
        self.lead = self.engines["rollout"] = Lead(engine, self._group, self.loss.tolerated)

    def run(self) -> None:
        """Until the trainers end the stream."""
        if self.over:
            return
        with self.watch.stage("meet", 0):
            start = meet(self.job, self.config, epoch_length=self.engines["loader"].epoch_length)
            self.rounds, self.version = start.window.rounds, start.done
            self.long_rounds = LongRounds(self.desk, start.window, self.config.stream.tail_tokens)
            if self._is_head:
                self._open(start)  # before the receiver, as the trainers do: opening a line waits for its other end
            self.receiver = Receiver(
                self.job,
                self.world,
                self.cast.replicas,
                self.cast.roles.train,
                self.config.comm.transport,
                self.config.comm.stage_timeout_s,
                rolling=self.config.stream.swap == "rolling",
            )
        if self._is_head:
            self._draw()
        else:
            self._follow()
        self.receiver.close()

    def _follow(self) -> None:
        assert self._group is not None
        more = True
        while more:
            with self.watch.stage("follow", max(self.receiver.version, self.version) + 1), self.spans("follow"):
                until = time.monotonic() + _STRETCH_S
                while more and time.monotonic() < until:
                    more = follow(self.lead.engine, self.receiver, self._group)

    def _draw(self) -> None:
        self.loss.open(self.producer, self.receiver)
        try:
            self._serve(self.loss.limit_s)
        except EngineFailure as failure:
            if not self.loss.tolerated:
                raise
            traceback.print_exc()
            self.loss.give_up(str(failure))
        self.spans.flush()
        self.lead.end()
        self.producer.close(self.config.comm.stage_timeout_s)

    def _serve(self, limit_s: float) -> None:
        with self.watch.stage("weights", self.version, limit_s), self.spans("weights"):
            self.receiver.wait(self.version, limit_s)
            self.version = self.lead.swap(self.receiver)
        while not self.producer.ended:
            if self.desk.unfinished():
                with self.watch.stage("rollout", self.version + 1, limit_s), self.spans("rollout"):
                    self._stretch(drawing=True)
            else:
                with self.watch.stage("wait", self.version + 1, limit_s), self.spans("wait"):
                    self._stretch(drawing=False)
            self.loss.check()
            self._check_deadlines(limit_s)

    def _open(self, start: Start) -> None:
        config, made, number = self.config, self.cast, self.number
        bell = Bell()
        inlet, outlet = open_ends(config.comm, self.job, made.roles.train[made.home(number)], number, bell)
        share = start.window, number, len(made.replicas), start.frontier
        starts: Starts = Starts(*share)
        if config.algorithm.dynamic_sampling:
            starts = SelectingStarts(*share, config.train.prompts_per_step, start.done)
        self.producer = Producer(
            starts,
            int(config.stream.limit_mib * 2**20),
            made.halves.columns,
            config.rollout.max_tokens,
            (inlet, outlet, bell),
            shared=config.model.prefix_sharing,
        )

    def _stretch(self, drawing: bool) -> None:
        """Work for about a second, as long as there is the one or the other to do."""
        until = time.monotonic() + _STRETCH_S
        self.lead.beat()
        while not self.producer.ended and time.monotonic() < until and bool(self.desk.unfinished()) == drawing:
            self.producer.listen()
            self._heed_notes()
            self._put_aside()
            if self.stop.is_set:
                self.producer.ask_to_stop()
            self._swap()
            self._admit()
            self._take_up()
            if self.desk.unfinished():
                self.desk.step()
            moved = self._advance()
            if not (drawing or moved or self.desk.unfinished()):
                self.producer.listen(_NAP_S)

    def _swap(self) -> None:
        """Take newer weights where they are there.

        Between groups: when nothing is being drawn, which comes about at the latest when the bound on staleness lets
        nothing more be begun. To empty the engine for every version would leave it half empty most of the time, while
        the longest responses end.
        """
        if self.receiver.newest() <= self.version:
            return
        if not self.desk.unfinished():
            with self.spans("load_weights"):
                self.version = self.lead.swap(self.receiver)
        elif self.config.stream.swap == "in_flight":
            with self.spans("load_weights"):
                self.version = self.lead.swap_in_flight(self.receiver, self.config.stream.keep_cache)

    def _admit(self) -> None:
        """Begin the groups that may be begun, as long as the engine has places and the stream has room."""
        while not self.long_rounds.under_way and self.desk.unfinished() < self.config.rollout.max_sequences:
            group = self.producer.starts.peek(self.version)
            if group is None:
                return
            if self._next is None or self._next[0] != group:
                self._next = (group, GroupRun(self.cast.rollout.order, self._context(group)))
            run = self._next[1]
            if not self.producer.start(group, self.producer.largest(run.batch)):
                return
            self._next = None
            self._running[group] = _Running(run, time.monotonic())
            self._foresee(group + len(self.cast.replicas))
            run.advance()

    def _foresee(self, group: int) -> None:
        """Have the prompt of the group that is probably next read in the background: the engine must not wait."""
        if group < self.rounds.groups:
            place = self.rounds.place(group)
            self.engines["loader"].foresee(Position(place.epoch, place.cursor), place.index, place.count)

    def _put_aside(self) -> None:
        if self.config.stream.tail_tokens:
            for group in self.long_rounds.put_aside(self._slips()):
                self._running[group].run.context.metrics.sum("stream/put_aside", 1.0)

    def _take_up(self) -> None:
        if self.config.stream.tail_tokens:
            for group in self.long_rounds.take_up(self.version, self._slips()):
                self._running[group].began = time.monotonic()

    def _slips(self) -> dict[int, list[Slip]]:
        return {group: running.slips() for group, running in self._running.items()}

    def _advance(self) -> bool:
        """Carry on with the groups whose responses or rewards have come; send those that are through."""
        through = [group for group, running in self._running.items() if running.run.advance()]
        for group in through:
            run = self._running.pop(group).run
            batch = run.batch
            if ACCEPTED in batch:
                batch = batch.select(batch[ACCEPTED].as_scalars().nonzero().flatten())
            self.producer.deliver(group, batch, run.context.metrics)
        return bool(through)

    def _context(self, group: int) -> Context:
        place = self.rounds.place(group)
        loader = _At(self.engines["loader"], Position(place.epoch, place.cursor))
        return Context(
            config=self.config,
            world=self.world,
            engines={**self.engines, "loader": loader},
            step=self.rounds.of(group) + 1,
            metrics=Metrics(),
            slot=place.index,
            slots=place.count,
            replica=0,
        )

    def _heed_notes(self) -> None:
        while self.producer.notes:
            what, facts = self.producer.notes.pop(0)
            match what:
                case "evaluate":
                    self._evaluate(*facts)
                case "lost":
                    self.producer.starts.take_over(*facts)
                case _:
                    raise ValueError(f"the trainers say {what!r}, which nobody understands here")

    def _evaluate(self, version: int, slot: int, slots: int) -> None:
        """Answer, with the weights of `version`; the trainers wait for it. What is being drawn is finished before.

        Where responses may be of several versions anyway, they are interrupted instead. (Not those with stop strings,
        which not every engine can go on with.)
        """
        limit_s = self.config.comm.stage_timeout_s
        interrupts = self.config.stream.swap == "in_flight" and not self.config.rollout.stop
        with self.watch.stage("evaluate", version), self.spans("evaluate", version):
            if interrupts:
                self.desk.pause()
            while self.desk.unfinished() and not interrupts:
                self.desk.step()
                self._advance()
            self.receiver.wait(version, limit_s)
            self.version = self.lead.swap(self.receiver)
            context = Context(self.config, self.world, self.engines, version, Metrics(), slot, slots, replica=0)
            self.producer.tell(answers(context))
            if interrupts:
                self.desk.resume()

    def _check_deadlines(self, limit_s: float) -> None:
        for group, running in self._running.items():
            if not self.long_rounds.waits(group) and time.monotonic() - running.began > limit_s:
                place = self.rounds.place(group)
                raise EngineFailure(
                    f"group {group} (epoch {place.epoch}, prompt {place.cursor + place.index} of it) was not finished "
                    f"after {limit_s:g} s"
                )
