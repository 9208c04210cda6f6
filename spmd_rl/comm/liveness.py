"""Failure detection without a centre: each rank watches its neighbours in a ring, and an alarm goes round.

A connection that ends without a goodbye is a dead rank, at once; one that is silent for `heartbeat_s` is a stuck one;
a stage beyond its deadline is found by the rank's own watchdog. Whoever notices prints one line and passes the alarm
on; every rank then ends by itself within about a second, also out of a collective that would wait for ever.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import TracebackType
from typing import Any

from spmd_rl.comm.alarm import EXIT_STOPPED, Alarm, one_line
from spmd_rl.comm.link import Link
from spmd_rl.comm.process import flush_and_exit, say
from spmd_rl.comm.ring import Ring
from spmd_rl.comm.stages import Stage, Stages
from spmd_rl.comm.world import World
from spmd_rl.config.errors import UserError
from spmd_rl.config.schema import CommConfig

_BEAT_S = 1.0
_TURN_S = 0.15  # between the neighbours that may report a rank: the first one's alarm silences the others
_OWN_END_S = 0.7  # a rank that is failing by itself gets so long to say so before another's failure ends it
_BLAME_S = 2.0  # a rank whose collective broke waits so long to hear who broke it
_STACKS_S = 1.0  # a launcher ends the others as soon as the first is gone: time for them to show where they are
_FAILED_EXIT_S = 10.0  # after its failure is announced, a rank must have ended; threads of libraries may hold it


class Liveness:
    """Watches the other ranks and this one, from a daemon thread. Collective to make and to close.

        with Liveness(world, config.comm) as watch:
            with watch.stage("rollout", step):
                ...

    Leaving the block by an exception tells all ranks, which then stop; leaving it normally waits for all ranks (they
    may come at different times) and says goodbye. Needs no thread of torch, holds no lock while it waits.
    """

    def __init__(self, world: World, comm: CommConfig) -> None:
        self._world = world
        self._heartbeat_s = comm.heartbeat_s
        self._stage_timeout_s = comm.stage_timeout_s
        self._lock = threading.Lock()
        self._stages = Stages()
        self._alarm: Alarm | None = None
        self._failed_at = math.inf  # when this rank's own exception came
        self._leaving = False
        # Asked when a stage of this rank is overdue, by the watching thread, again and again: whether it is dealt with.
        self.on_overdue: Callable[[Stage], bool] = lambda stage: False
        self.expendable: frozenset[int] = frozenset()  # ranks that may die while the others go on; set it on all ranks
        self.lost: frozenset[int] = frozenset()  # those of them that did
        self._suspects: dict[int, tuple[float, Alarm]] = {}  # peer → when to report it, and how
        self._ring = Ring(world)
        self._thread = threading.Thread(target=self._watch, name="liveness", daemon=True)
        self._thread.start()
        if not self._ring.whole.wait(comm.init_timeout_s):
            late = f"{self._ring.awaited} of its neighbours did not connect within {comm.init_timeout_s:g} s"
            raise RuntimeError(f"rank {world.rank}: {late}")

    @contextlib.contextmanager
    def stage(self, name: str, step: int, deadline_s: float | None = None) -> Iterator[None]:
        """What this rank is doing, for messages, and until when (default: `comm.stage_timeout_s`). May be nested."""
        limit_s = self._stage_timeout_s if deadline_s is None else deadline_s
        try:
            with self._stages.entered(name, step, limit_s):
                self._beat()
                yield
        finally:
            self._beat()

    def close(self) -> None:
        """Wait for all ranks, still watching them, then say goodbye. For a normal end."""
        with self.stage("end", self._stages.now().step):
            self._meet_all()
        self._ring.post({"goodbye": self._world.rank})
        self._leaving = True
        self._ring.wake()
        self._thread.join(5.0)

    def fail(self, error: BaseException) -> None:
        """Tell all ranks that this one fails, unless the error only follows from another rank's end.

        Then this does not return: the process ends with the other rank's alarm. Leaving the block calls it; call it
        earlier where closing things on the way out may take time. The process has to end within 10 s after it.
        """
        if self._failed_at < math.inf:
            return
        if _may_follow(error):
            self._await_alarm(_BLAME_S)  # a broken collective: who broke it is known in a moment
        me = self._world.rank
        name, step = self._stages.raised_in(error)
        alarm = Alarm("failed", me, socket.gethostname(), os.getpid(), name, step, me, one_line(error))
        if self._raise(alarm) and not isinstance(error, UserError):  # main prints a UserError itself
            say(alarm.line())
        self._failed_at = time.monotonic()
        self._ring.wake()

    @contextlib.contextmanager
    def announcing(self) -> Iterator[None]:
        """`fail` as soon as an exception leaves the block: what is closed after it may take long, and others wait."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def __enter__(self) -> Liveness:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            try:
                self.close()
            except BaseException as broken:
                self.fail(broken)
                raise
        else:
            self.fail(error)

    def _meet_all(self) -> None:
        """Wait for all ranks. There is no barrier without those that are lost: then each leaves when it is done."""
        wait_s = min(self._stage_timeout_s, 1e6) + 60.0  # the stage's own deadline comes first and says more
        if self.lost:
            return
        try:
            self._world.control.barrier(timeout=timedelta(seconds=wait_s)).wait()
        except RuntimeError:
            until = time.monotonic() + _BLAME_S
            while self.expendable and not self.lost and time.monotonic() < until:
                time.sleep(0.02)
            if not self.lost:
                raise

    # ---- the watching thread

    def _watch(self) -> None:
        beat_s = min(_BEAT_S, self._heartbeat_s / 4)
        next_beat = last = time.monotonic()
        while not self._leaving:
            soonest = min([next_beat, *(due for due, _ in self._suspects.values())])
            for link, message in self._ring.turn(soonest - time.monotonic()):
                if message is not None:
                    self._take(link, message)
                elif not (link.said_goodbye or self._leaving):
                    self._suspect(link, "died", "")
            now = time.monotonic()
            if now - last > self._heartbeat_s / 2:  # it was we who were away: nobody else is to blame
                for link in self._ring.links:
                    link.heard = now
            last = now
            if now >= next_beat:
                next_beat = now + beat_s
                self._beat()
                self._arm_stack_dump()
            self._look_round(now)
        faulthandler.cancel_dump_traceback_later()
        self._ring.hang_up()

    def _arm_stack_dump(self) -> None:
        """Should this thread get no turn until just before we are called stuck, C code writes our stacks to stderr."""
        faulthandler.dump_traceback_later(0.9 * self._heartbeat_s, exit=False, file=2)

    def _take(self, link: Link, message: dict[str, Any]) -> None:
        if "hello" in message:
            self._tell_stage(link)
        elif "stage" in message:
            link.stage, link.step = message["stage"], message["step"]
        elif "goodbye" in message:
            link.said_goodbye = True
        elif "lost" in message:
            self._mourn(message["lost"])
        elif "alarm" in message and self._raise(Alarm(**message["alarm"])):
            self._stop(noticed_here=False)

    def _look_round(self, now: float) -> None:
        """Act on whatever is due: an own stage beyond its deadline, a silent neighbour, a suspect to report."""
        if now - self._failed_at > _FAILED_EXIT_S:
            flush_and_exit(1)
        if self._alarm is not None:  # our own failure, already announced: main is ending
            return
        for link in self._ring.links:
            silent_s = now - link.heard
            if silent_s > self._heartbeat_s and not link.said_goodbye:
                self._suspect(link, "stuck", f"silent for {silent_s:.0f} s")
            elif link.rank in self._suspects and self._suspects[link.rank][1].kind == "stuck":
                del self._suspects[link.rank]
        overdue = self._stages.overdue()
        if overdue is not None and not self.on_overdue(overdue):
            self._report_overdue(overdue)
        for due, alarm in list(self._suspects.values()):
            if now >= due and self._raise(alarm):
                self._stop(noticed_here=True)

    def _suspect(self, link: Link, kind: str, cause: str) -> None:
        peer = self._ring.peers[link.rank]
        if peer.rank in self.expendable:
            if kind == "stuck":
                peer.kill_if_here(self._ring.machine)
            self._mourn(peer.rank)
            return
        alarm = Alarm(kind, peer.rank, peer.host, peer.pid, link.stage, link.step, self._world.rank, cause)
        due = time.monotonic() + _TURN_S * link.order
        known = self._suspects.get(link.rank)
        if known is None or due < known[0] or known[1].kind != kind == "died":
            self._suspects[link.rank] = (due, alarm)

    def _mourn(self, rank: int) -> None:
        """A rank is lost that the others can do without: pass it on, and go on."""
        if rank not in self.lost:
            self.lost |= {rank}
            self._ring.post({"lost": rank})

    def _report_overdue(self, stage: Stage) -> None:
        elsewhere = sorted({(link.rank, link.stage, link.step) for link in self._ring.links})
        others = [
            f"rank {rank} is in stage '{name}' of step {step}"
            for rank, name, step in elsewhere
            if (name, step) != (stage.name, stage.step)
        ]
        cause = ", ".join([f"{time.monotonic() - stage.began:.0f} s of {stage.deadline_s:g} s", *others])
        me = self._world.rank
        if self._raise(Alarm("overdue", me, socket.gethostname(), os.getpid(), stage.name, stage.step, me, cause)):
            self._stop(noticed_here=True)

    # ---- stopping

    def _raise(self, alarm: Alarm) -> bool:
        """Pass the alarm on, if it is the first one here (and whether it is)."""
        with self._lock:
            if self._alarm is not None or self._leaving:
                return False
            self._alarm = alarm
        self._ring.post({"alarm": alarm.message()})
        return True

    def _stop(self, noticed_here: bool) -> None:
        """End this process because of the alarm. Does not return, unless this rank is failing by itself."""
        alarm = self._alarm
        assert alarm is not None
        if not noticed_here and alarm.kind == "failed" and self._fails_too():
            return
        first_here = self._world.local_rank == 0 and self._ring.peers[alarm.by].machine != self._ring.machine
        if noticed_here or first_here:  # one line on every machine
            say(alarm.line())
        now = self._stages.now()
        mine = alarm.rank == self._world.rank
        if (alarm.kind in ("stuck", "overdue") and mine) or (
            alarm.kind == "overdue" and (now.name, now.step) != (alarm.stage, alarm.step)
        ):
            say(f"rank {self._world.rank}, in stage '{now.name}' of step {now.step}, its Python stacks:")
            faulthandler.dump_traceback(file=2, all_threads=True)
        self._ring.hang_up()
        if alarm.kind == "stuck":
            self._ring.peers[alarm.rank].kill_if_here(self._ring.machine)
        if alarm.kind == "overdue" and noticed_here:
            time.sleep(_STACKS_S)
        flush_and_exit(EXIT_STOPPED)

    def _fails_too(self) -> bool:
        """Whether an exception of our own is under way: then main ends with its own message and exit status."""
        until = time.monotonic() + _OWN_END_S
        while time.monotonic() < until:
            if self._failed_at < math.inf:
                return True
            time.sleep(0.02)
        return False

    def _await_alarm(self, seconds: float) -> None:
        """Give the watching thread time to learn of another rank's end; it then ends this process."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._alarm is not None:
                time.sleep(5.0)  # `_stop` is at work
                return
            time.sleep(0.02)

    # ---- small things

    def _beat(self) -> None:
        for link in list(self._ring.links):
            self._tell_stage(link)

    def _tell_stage(self, link: Link) -> None:
        now = self._stages.now()
        link.post({"stage": now.name, "step": now.step}, droppable=True)


def _may_follow(error: BaseException) -> bool:
    """Whether it may come of a broken collective: torch raises RuntimeError, and sometimes another one on top."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, RuntimeError):
        cause = cause.__cause__ or cause.__context__
    return cause is not None and not isinstance(error, UserError)
