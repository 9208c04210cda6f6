"""The stream as services, for programs that bring their own rollout or training engine.

Every rank runs the same file, as in the rest of the project:

    with init_engines(Settings(columns=("prompt", "response", "reward"), ...)) as service:
        service.put_prompts(prompts)                     # the same everywhere
        if isinstance(service, TrainService):
            service.notify_weight_sync(weights)          # version 0
            while service.step < settings.steps:
                for batch in service.get_experience(["response", "reward"]):
                    ...                                  # the groups of one step, as they come
                service.notify_weight_sync(weights)      # ends the step; sends in the background
        else:
            while not service.ended:
                service.notify_weight_sync(engine)       # takes what is there: engine.load_weights(weights, version)
                work = service.next_prompt(wait_s=0.1)   # as the bound on staleness and the room allow
                if work is not None:
                    service.put_experience(work, {"response": [...], ...})

Groups, staleness, back-pressure and versions are those of `mode: async` (docs/stream.md, docs/weights.md); each group
is trained on once. `examples/own_engines.py` is a whole program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from spmd_rl.comm.bootstrap import bootstrap_roles, shutdown
from spmd_rl.comm.digest import agree
from spmd_rl.comm.liveness import Liveness
from spmd_rl.comm.transport import make_transport
from spmd_rl.comm.world import World
from spmd_rl.config.errors import UserError
from spmd_rl.config.schema import CommConfig
from spmd_rl.data.batch import Batch, Column
from spmd_rl.data.stream.admission import Frontier, Starts
from spmd_rl.data.stream.channel import Bell, open_ends
from spmd_rl.data.stream.consumer import Consumer
from spmd_rl.data.stream.ledger import Ledger
from spmd_rl.data.stream.loader import stream_loader
from spmd_rl.data.stream.producer import Producer
from spmd_rl.data.stream.rounds import Rounds
from spmd_rl.data.stream.store import Store
from spmd_rl.data.stream.window import Window
from spmd_rl.observe.metrics import Metrics
from spmd_rl.weights.publish import Publisher
from spmd_rl.weights.receive import Loads, Receiver
from spmd_rl.weights.shelf import NOTHING

TRAIN, ROLLOUT = "train", "rollout"
Weights = Callable[[], Iterable[tuple[str, Tensor]]]


@dataclass(frozen=True)
class Settings:
    """train, rollout: ranks of the job; columns: what rollout ranks put and trainers get; group_mib: greatest size of
    one group, all its columns together; limit_mib: of all groups of one replica that are alive; the rest is as in the
    sections `train`, `stream` and `comm` of a run. progress: of a program that goes on, see `TrainService.progress`.
    """

    train: Sequence[int]
    rollout: Sequence[int]
    columns: Sequence[str]
    steps: int
    prompts_per_step: int
    staleness: int = 1
    group_mib: float = 1.0
    limit_mib: float = 256.0
    comm: CommConfig = field(default_factory=CommConfig)
    progress: tuple[int, Frontier] = (0, Frontier())


@dataclass(frozen=True)
class Work:
    """A prompt to make experience of. epoch, index: which of `put_prompts`, in which pass over them."""

    group: int
    epoch: int
    index: int
    prompt: Any
    version: int


def init_engines(settings: Settings) -> TrainService | RolloutService:
    """Meet the other ranks; the service of this rank's role. Raises UserError for settings that cannot be."""
    if settings.staleness < 0:
        raise UserError(f"staleness={settings.staleness}: 0 (on-policy) or more is wanted")
    if settings.group_mib > settings.limit_mib:
        raise UserError(f"limit_mib={settings.limit_mib:g} is less than one group of group_mib={settings.group_mib:g}")
    if "version" in settings.columns:
        raise UserError("the column 'version' is put by the service itself")
    roles = {TRAIN: tuple(settings.train), ROLLOUT: tuple(settings.rollout)}
    job, mine = bootstrap_roles(settings.comm, 1, roles)
    kind = TrainService if mine.role == TRAIN else RolloutService
    return kind(settings, job, mine)


class _Service:
    """Use it in a `with` block: leaving it by an exception ends all ranks, naming this one."""

    def __init__(self, settings: Settings, job: World, mine: World) -> None:
        self.settings, self.job, self.world = settings, job, mine
        self._limit_s = settings.comm.stage_timeout_s
        self._watch = Liveness(job, settings.comm)
        agree(job, "the settings", repr(settings))
        self._replicas = [[rank] for rank in settings.rollout]
        self._bell = Bell()

    def put_prompts(self, prompts: Sequence[Any]) -> None:
        """What experience is to be made of, in this order, over and over; the same on all ranks. Call it once."""
        if not len(prompts):
            raise UserError("there are no prompts")
        agree(self.job, "the number of prompts", str(len(prompts)))
        settings = self.settings
        self._open(prompts, Rounds(len(prompts), settings.prompts_per_step, settings.steps))

    def __enter__(self) -> Any:
        self._watch.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._close()
        except BaseException as broken:
            self._watch.fail(broken)
            raise
        self._watch.__exit__(kind, error, trace)
        if error is None:
            shutdown(self.job)

    def _home(self, replica: int) -> int:
        return replica % len(self.settings.train)

    def _open(self, prompts: Sequence[Any], rounds: Rounds) -> None:
        raise NotImplementedError

    def _close(self) -> None:
        raise NotImplementedError


class TrainService(_Service):
    """On the ranks that train, which call it alike. step: steps that are done, the version of the weights."""

    def __init__(self, settings: Settings, job: World, mine: World) -> None:
        super().__init__(settings, job, mine)
        self.step, self._frontier = settings.progress
        self.metrics = Metrics()  # staleness/* and stream/* of the step under way
        self._got = False

    @property
    def progress(self) -> tuple[int, Frontier]:
        """What a checkpoint of the weights must hold beside them, to be `Settings.progress` of the next start."""
        return self.step, self._frontier

    def get_experience(self, columns: Sequence[str], tokens: int = 0) -> DataLoader[Batch]:
        """The groups of the next step as they come: a loader of ragged batches, one pass over it.

        tokens: of columns `prompt` and `response` over all trainers, after which a batch is handed out; 0: the whole
        step at once. Every trainer gets as many batches as the others, each with its own groups, maybe none.
        """
        unknown = [name for name in columns if name not in (*self.settings.columns, "version")]
        if unknown:
            raise KeyError(f"column {unknown[0]!r} is not among {', '.join(self.settings.columns)}")
        self.metrics = Metrics()

        def portions() -> Iterator[Batch]:
            step = self.step + 1
            with self._watch.stage("get_experience", step):
                for portion in self._consumer.portions(step, max(tokens, 1), not tokens, self.metrics):
                    yield portion.batch
            self._got = True

        return stream_loader(portions, columns)

    def notify_weight_sync(self, weights: Weights) -> None:
        """Send `weights()`, (name, full tensor) pairs, to all replicas; returns once they are copied.

        To be called before the first step, and after each: its experience is in the weights now.
        """
        if self._got:
            self.step += 1
            self._frontier = self._consumer.acknowledge()
            self._got = False
        with self._watch.stage("notify_weight_sync", self.step):
            self._publisher.publish(weights, self.step)

    def _open(self, prompts: Sequence[Any], rounds: Rounds) -> None:
        settings, comm = self.settings, self.settings.comm
        lines = {
            replica: open_ends(comm, self.job, rank, replica, self._bell)
            for replica, rank in enumerate(settings.rollout)
            if self._home(replica) == self.world.rank
        }
        several = self.world.size > 1
        transport = make_transport(comm.transport, self.world, self._limit_s)
        self._consumer = Consumer(
            self.world,
            transport.open(range(self.world.size)) if several else None,
            Ledger(Window(rounds, settings.staleness), self._frontier),
            Store((*settings.columns, "version"), self.world.rank),
            lines,
            self._bell,
            replicas=len(self._replicas),
            limit_s=self._limit_s,
        )
        self._publisher = Publisher(self.job, self.world, self._replicas, comm.transport, self._limit_s)

    def _close(self) -> None:
        self._consumer.close(self._limit_s)
        self._publisher.close()


class RolloutService(_Service):
    """On the ranks that draw, each by itself. version: of the weights that its engine has; -1 at first."""

    def __init__(self, settings: Settings, job: World, mine: World) -> None:
        super().__init__(settings, job, mine)
        self.version = NOTHING

    @property
    def ended(self) -> bool:
        """The trainers want nothing more."""
        return self._producer.ended

    def next_prompt(self, wait_s: float = 0.0) -> Work | None:
        """The prompt to begin now; None where none may be begun before newer weights or room have come, `wait_s`
        seconds long. Several may be under way at a time."""
        self._producer.listen()
        if (work := self._begin()) is None and wait_s and not self.ended:
            self._producer.listen(wait_s)
            work = self._begin()
        return work

    def put_experience(self, work: Work, columns: Mapping[str, Tensor | Sequence[Tensor]]) -> None:
        """The finished group: for every column one tensor per sample, or one number per sample as a tensor. Returns at
        once."""
        made = {
            name: Column.scalars(values) if isinstance(values, Tensor) else Column.from_rows(list(values))
            for name, values in columns.items()
        }
        if set(made) != set(self.settings.columns):
            raise ValueError(f"columns {', '.join(self.settings.columns)} are wanted, not {', '.join(made)}")
        samples = len(next(iter(made.values())).lengths)
        made["version"] = Column.scalars(torch.full((samples,), work.version))
        ids = torch.tensor([[work.epoch, work.index, sample] for sample in range(samples)]).reshape(-1, 3)
        self._producer.deliver(work.group, Batch(ids, made), Metrics())

    def notify_weight_sync(self, engine: Loads) -> int:
        """Have `engine` load the newest weights that have come, if it has older ones; their version."""
        if self._receiver.newest() > self.version:
            with self._watch.stage("notify_weight_sync", self.version + 1):
                self.version = self._receiver.swap(engine)
        return self.version

    def _begin(self) -> Work | None:
        group = None if self.version == NOTHING else self._producer.starts.peek(self.version)
        if group is None or not self._producer.start(group, int(self.settings.group_mib * 2**20)):
            return None
        place = self._rounds.place(group)
        index = place.cursor + place.index
        return Work(group, place.epoch, index, self._prompts[index], self.version)

    def _open(self, prompts: Sequence[Any], rounds: Rounds) -> None:
        settings, comm = self.settings, self.settings.comm
        self._prompts, self._rounds = prompts, rounds
        replica = list(settings.rollout).index(self.job.rank)
        ends = open_ends(comm, self.job, settings.train[self._home(replica)], replica, self._bell)
        frontier = settings.progress[1]
        self._producer = Producer(
            Starts(Window(rounds, settings.staleness), replica, len(self._replicas), frontier),
            int(settings.limit_mib * 2**20),
            (*settings.columns, "version"),
            0,
            (*ends, self._bell),
        )
        self._receiver = Receiver(
            self.job, self.world, self._replicas, tuple(settings.train), comm.transport, self._limit_s
        )

    def _close(self) -> None:
        self._producer.close(self._limit_s)
        self._receiver.close()
