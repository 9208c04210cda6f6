"""The ends of a line between a replica and its home trainer: whoever puts never waits, whoever takes never polls."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

from torch import Tensor

from spmd_rl.comm.line import Line, open_line
from spmd_rl.comm.transport import TransportError
from spmd_rl.comm.world import World
from spmd_rl.config.schema import CommConfig
from spmd_rl.data.stream.frames import Frame, Kind, Message, pack, unpack

_BEATS = 8  # a silent line says that it is alive so many times within the limit of a wait
_FRAME_BYTES = 64 << 20  # a frame with more than this is sent before further messages join it


class Bell:
    """Rung when something has come in; one for all inlets of a rank."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._rings = 0
        self._heard = 0

    def ring(self) -> None:
        with self._condition:
            self._rings += 1
            self._condition.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Whether it has been rung since the last call; waits for it."""
        with self._condition:
            rung = self._condition.wait_for(lambda: self._rings > self._heard, timeout_s)
            self._heard = self._rings
            return rung


class Outlet:
    """Sends messages from a thread of its own; those that have gathered meanwhile go in one frame.

    beat_s: a line without news carries an empty frame so often, so that the other end can tell silence from death.
    """

    def __init__(self, line: Line, beat_s: float) -> None:
        self._line, self._beat_s = line, beat_s
        self._queue: deque[tuple[Message, Tensor | None]] = deque()
        self._condition = threading.Condition()
        self._error: TransportError | None = None
        # A daemon: a process that ends because of an error elsewhere must not wait here for a peer.
        self._thread = threading.Thread(target=self._run, name=f"outlet-{line.peer}", daemon=True)
        self._thread.start()

    def put(self, message: Message, body: Tensor | None = None) -> None:
        """Never waits. Raises TransportError where the line has broken before."""
        self.put_all([(message, body)])

    def put_all(self, messages: Sequence[tuple[Message, Tensor | None]]) -> None:
        if self._error is not None:
            raise self._error
        with self._condition:
            self._queue.extend(messages)
            self._condition.notify()

    def close(self, timeout_s: float) -> None:
        """Send what is left and say that nothing follows. Raises TransportError where that takes too long."""
        self.put(Message(Kind.CLOSE))
        self._thread.join(timeout_s)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            raise TransportError(f"rank {self._line.peer} did not take the last messages within {timeout_s:g} s")

    def _run(self) -> None:
        closed = False
        try:
            while not closed:
                messages, bodies = self._gather()
                self._line.send(pack(messages, bodies))
                closed = bool(messages) and messages[-1].kind == Kind.CLOSE
        except TransportError as error:
            self._error = error

    def _gather(self) -> tuple[list[Message], list[Tensor | None]]:
        messages: list[Message] = []
        bodies: list[Tensor | None] = []
        with self._condition:
            self._condition.wait_for(lambda: bool(self._queue), self._beat_s)
            size = 0
            while self._queue and size < _FRAME_BYTES:
                message, body = self._queue.popleft()
                messages.append(message)
                bodies.append(body)
                size += message.size
        return messages, bodies


class Inlet:
    """Receives frames in a thread of its own and rings the bell."""

    def __init__(self, line: Line, bell: Bell) -> None:
        self.peer = line.peer
        self.closed = False  # the other end has said its last word
        self._line, self._bell = line, bell
        self._frames: deque[Frame] = deque()
        self._error: TransportError | None = None
        self._thread = threading.Thread(target=self._run, name=f"inlet-{line.peer}", daemon=True)
        self._thread.start()

    def take(self) -> list[Frame]:
        """What has come in since the last call. Raises TransportError where the line has broken, after all of it."""
        frames = [self._frames.popleft() for _ in range(len(self._frames))]
        if not frames and self._error is not None:
            raise self._error
        return frames

    def join(self, timeout_s: float) -> None:
        """Wait for the other end's last word, throwing away what comes before it."""
        until = time.monotonic() + timeout_s
        self._thread.join(timeout_s)
        if self._thread.is_alive() and time.monotonic() >= until:
            raise TransportError(f"rank {self.peer} did not end the stream within {timeout_s:g} s")

    def _run(self) -> None:
        try:
            while not self.closed:
                frame = unpack(self._line.receive())
                if len(frame.table):
                    self._frames.append(frame)
                    self.closed = int(frame.table[-1, 0]) == Kind.CLOSE
                    self._bell.ring()
        except TransportError as error:
            self._error = error
            self._bell.ring()


def open_ends(comm: CommConfig, job: World, peer: int, replica: int, bell: Bell) -> tuple[Inlet, Outlet]:
    """This rank's end of the line between a replica and its home trainer; waits for the other end."""
    limit_s = max(comm.timeout_s, comm.heartbeat_s)
    line = open_line(comm.transport, job, peer, f"stream/{replica}", limit_s)
    return Inlet(line, bell), Outlet(line, limit_s / _BEATS)
