"""A trainer of an asynchronous job: steps on what the replicas send, weights back to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

from spmd_rl.comm.bootstrap import describe
from spmd_rl.comm.liveness import Liveness
from spmd_rl.comm.stop import StopFlag
from spmd_rl.comm.transport import make_transport
from spmd_rl.comm.world import World
from spmd_rl.config.check import derived_sizes
from spmd_rl.config.schema import Config
from spmd_rl.data.batch import Batch
from spmd_rl.data.stream.admission import Frontier
from spmd_rl.data.stream.channel import Bell, open_ends
from spmd_rl.data.stream.consumer import Consumer, Portion
from spmd_rl.data.stream.ledger import Ledger
from spmd_rl.data.stream.selection import SelectingLedger, TooFew
from spmd_rl.data.stream.store import Store
from spmd_rl.graph.roles import SOURCE
from spmd_rl.graph.stage import rank_spans
from spmd_rl.job import Job
from spmd_rl.job_async import Cast, Start, meet, share
from spmd_rl.observe.metrics import Metrics
from spmd_rl.recipes.dynamic import TooFewGroups
from spmd_rl.recipes.evaluate import RECORDED, results
from spmd_rl.weights.publish import Publisher


class Source:
    """What the first stage hands out, and which groups are done with: the stream's part of a checkpoint."""

    def __init__(self) -> None:
        self.claimed = Batch.empty()
        self.frontier = Frontier()

    def state_dict(self) -> dict[str, Any]:
        # As text: a list would become one entry of the checkpoint per item.
        return {"next": self.frontier.next, "beyond": ",".join(map(str, self.frontier.beyond))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        beyond = tuple(int(group) for group in str(state["beyond"]).split(",") if group)
        self.frontier = Frontier(int(state["next"]), beyond)


class TrainerJob(Job):
    """The synchronous job on the training ranks, but for where samples come from and weights go to.

    job: the world of all ranks; mine: that of the trainers.
    """

    sampled = "actor"

    def __init__(
        self,
        config: Config,
        job: World,
        mine: World,
        made: Cast,
        watch: Liveness,
        stop: StopFlag,
        opened: ExitStack,
    ) -> None:
        self._job, self._cast = job, made
        super().__init__(config, mine, made.train, watch, stop, opened)
        self.source = self.engines[SOURCE] = Source()

    def _facts(self) -> dict[str, object]:
        config, roles = self.config, self._cast.roles
        per_step = config.train.prompts_per_step
        return {
            "launch of the trainers": describe(self.world),
            "roles": f"ranks {rank_spans(roles.train)} train, ranks {rank_spans(roles.rollout)} draw",
            "groups drawn ahead at most": per_step * (1 + config.algorithm.dynamic_sampling)
            + (config.stream.surplus or per_step * config.stream.staleness),
            **derived_sizes(config, len(roles.rollout)),
        }

    def _claimed(self) -> None:
        share(self._job, self.config.comm.stage_timeout_s, over=self.over)

    def _begin(self) -> None:
        """Meet the replicas, open the stream, and give them the weights."""
        config, job, made = self.config, self._job, self._cast
        with self.stage("meet", self.done):
            start = meet(job, config, done=self.done, frontier=self.source.frontier)
            bell = Bell()
            heads = [replica[0] for replica in made.replicas]
            own = [r for r in range(len(heads)) if made.home(r) == self.world.rank]
            lines = {replica: open_ends(config.comm, job, heads[replica], replica, bell) for replica in own}
            transport = make_transport(config.comm.transport, self.world, config.comm.stage_timeout_s)
            self._start = start
            self.consumer = Consumer(
                self.world,
                transport.open(range(self.world.size)) if self.world.size > 1 else None,
                self._ledger(start),
                Store(made.halves.columns, self.world.rank),
                lines,
                bell,
                replicas=len(heads),
                limit_s=config.comm.stage_timeout_s,
                updates=config.train.updates_per_step,
                tolerant=config.stream.tolerate_replica_loss,
            )
            self.publisher = Publisher(
                job,
                self.world,
                made.replicas,
                config.comm.transport,
                config.comm.stage_timeout_s,
                tolerant=config.stream.tolerate_replica_loss,
            )
            self._alive = self.consumer.shares.alive
            if config.stream.tolerate_replica_loss:
                self.watch.expendable = frozenset(made.roles.rollout)
            self._publish(self.done)

    def _ledger(self, start: Start) -> Ledger | SelectingLedger:
        wanted = self.config.train.prompts_per_step
        if self.config.algorithm.dynamic_sampling:
            tries = self.config.algorithm.dynamic_sampling_tries
            self.ledger = SelectingLedger(start.window, start.frontier, wanted, start.done, tries)
            return self.ledger
        return Ledger(start.window, start.frontier)

    def _asked_to_stop(self) -> bool:
        if self.consumer.stop_asked_by is not None:
            self.stop.set(f"a signal to rank {self.consumer.stop_asked_by}")
        return super()._asked_to_stop()

    def _train(self, step: int) -> tuple[Batch, Metrics]:
        """Train on the groups of `step` as they come, then publish the weights."""
        config, metrics = self.config, Metrics()
        whole = config.stream.train_on == "step"
        portions = self.consumer.portions(step, config.train.tokens_per_microbatch * self.world.size, whole, metrics)
        kept: list[Batch] = []
        while True:
            with self.stage("wait", step):
                portion = self._next_of(portions)
            if portion is None:
                break
            self.source.claimed = portion.batch
            samples, _ = self.runner.step(step, RECORDED, portion.last, metrics)
            kept.append(samples)
        if config.algorithm.dynamic_sampling:
            metrics.set("dynamic/rounds", self.ledger.drawn)
            metrics.set("dynamic/waiting", len(self.ledger))
        self.source.claimed = Batch.empty()
        self.source.frontier = self.consumer.acknowledge()
        with self.stage("publish", step):
            self._forget_lost()
            self._publish(step)
        return Batch.concat([samples for samples in kept if len(samples)]), metrics

    def _forget_lost(self) -> None:
        """Replicas that the stream has lost since the last call."""
        before, self._alive = self._alive, self.consumer.shares.alive
        for replica in set(before) - set(self._alive):
            self.publisher.forget(replica)
            rank = self._cast.replicas[replica][0]
            self.recorder.say(f"replica {replica} (rank {rank}) is lost; {len(self._alive)} go on with its groups")

    def _next_of(self, portions: Iterator[Portion]) -> Portion | None:
        try:
            return next(portions, None)
        except TooFew as few:
            wanted = self.config.train.prompts_per_step
            raise TooFewGroups(
                f"dynamic sampling: after {few.rounds} rounds of {wanted} prompts, {few.found} of the {wanted} groups "
                "wanted have rewards that differ. The task is too hard or too easy, the reward is constant, or "
                "train.samples_per_prompt is too small; a new start goes on from here with larger "
                "algorithm.dynamic_sampling_tries",
                Batch.empty(),
            ) from None

    def _publish(self, version: int) -> None:
        self.publisher.publish(self.engines["actor"].named_weights, version)
        if self.config.stream.send == "blocking":
            self.publisher.wait(version)

    def _exhausted(self) -> bool:
        return self.source.frontier.next >= self._start.window.rounds.groups

    def _evaluate(self) -> None:
        """The replicas answer, with the weights of now; the trainers wait for them and judge."""
        if not self.config.data.eval:
            return
        with self.stage("evaluate", self.done):
            come = self._answers()
            while self.config.stream.tolerate_replica_loss and self.consumer.lost_meanwhile():
                self._forget_lost()
                come = self._answers()
            answered = {
                source.name: Batch.concat([part[source.name] for part in come if len(part[source.name])])
                for source in self.config.data.eval
            }
            self.recorder.evaluation(self.done, *results(self._context("actor"), answered))

    def _answers(self) -> list[dict[str, Batch]]:
        """What the replicas of this trainer answer to their parts of the held-out prompts."""
        alive = self.consumer.shares.alive
        own = [replica for replica in alive if self._cast.home(replica) == self.world.rank]
        for replica in own:
            self.consumer.tell(replica, ("evaluate", (self.done, alive.index(replica), len(alive))))
        come = [self.consumer.await_note(replica) for replica in own]
        return [part for part in come if part is not None]

    def _end(self) -> None:
        with self.stage("end", self.done):
            self.consumer.close(self.config.comm.stage_timeout_s)
            self.publisher.close()
