"""A rollout replica whose engine fails or hangs, where the job goes on without it (`stream.tolerate_replica_loss`)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

from spmd_rl.comm.bootstrap import shutdown
from spmd_rl.comm.liveness import Liveness
from spmd_rl.comm.process import flush_and_exit
from spmd_rl.comm.stages import Stage
from spmd_rl.comm.world import World
from spmd_rl.config.schema import Config
from spmd_rl.data.stream.producer import Producer
from spmd_rl.weights.receive import Receiver

_TURN_S = 0.5
_DRAWS = ("rollout", "wait", "evaluate", "weights")  # stages in which the engine is at work, or may be


class Loss:
    """The process stays until the end, because most launchers end a job with the first process that dies.

    replicas: ranks of the job that draw. tolerated: whether the job goes on without one; lost: whether it is this one.
    Made before there is a stream: `open`.
    """

    def __init__(self, config: Config, job: World, watch: Liveness, replicas: Iterable[int]) -> None:
        self._config, self._job, self._watch = config, job, watch
        self.tolerated = config.stream.tolerate_replica_loss
        self.lost = False
        self._replicas = frozenset(replicas)
        self._producer: Producer | None = None
        self._receiver: Receiver | None = None

    @property
    def limit_s(self) -> float:
        """Longest work on one thing. Where others go on, they must do so before the trainers give up waiting."""
        return self._config.comm.stage_timeout_s / (2 if self.tolerated else 1)

    def open(self, producer: Producer, receiver: Receiver) -> None:
        self._producer, self._receiver = producer, receiver
        if self.tolerated:
            self._watch.on_overdue = self._is_survived
            self._watch.expendable = self._replicas

    def give_up(self, reason: str) -> None:
        """The engine has failed: the others make what is left, and this rank waits for the end of the stream."""
        self._hand_over(reason)
        assert self._producer is not None
        while not self._producer.ended:
            with self._watch.stage("lost", 0):
                self._producer.listen(_TURN_S)

    def check(self) -> None:
        """Called by the main thread: should the call that hung come back, `_outlive` ends this process."""
        if self.lost:
            threading.Event().wait()

    def close(self, engine: Any) -> None:
        """That of a lost replica may fail in it."""
        try:
            engine.close()
        except Exception:
            if not self.lost:
                raise

    def _hand_over(self, reason: str) -> None:
        self.lost = True
        assert self._producer is not None and self._receiver is not None
        self._producer.give_up(reason)
        self._receiver.close()

    def _is_survived(self, stage: Stage) -> bool:
        """A stage is overdue: whether the job goes on without this replica. Called by the watching thread."""
        if stage.name not in _DRAWS:
            return False
        if not self.lost:
            self.lost = True
            reason = f"its engine hangs in stage '{stage.name}' of step {stage.step} for {stage.deadline_s:g} s"
            threading.Thread(target=self._outlive, args=(reason,), name="outlive", daemon=True).start()
        return True

    def _outlive(self, reason: str) -> None:
        """While the main thread hangs in the engine: hand over, wait for the end with the others, and leave."""
        self._hand_over(reason)
        assert self._producer is not None
        while not self._producer.closing:
            time.sleep(_TURN_S)
        self._producer.close(self._config.comm.stage_timeout_s)
        self._watch.close()
        if not self._watch.lost:
            shutdown(self._job)
        flush_and_exit(0)
