"""A connection to a neighbour in the ring of ranks: lines of JSON both ways, never waiting for the other side."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

_LIMIT = 1 << 20  # bytes of one line; more is not from us


@dataclass(frozen=True)
class Peer:
    """How to reach and name a rank. `started` tells the process from a later one with the same pid."""

    rank: int
    host: str
    machine: str
    pid: int
    started: str
    address: str
    port: int

    def kill_if_here(self, machine: str) -> None:
        """SIGKILL, where it is a process of this machine (and pid namespace) and still the same one."""
        if self.machine == machine and self.started and process_start(self.pid) == self.started:
            with contextlib.suppress(OSError):
                os.kill(self.pid, 9)


def successors(rank: int, size: int) -> list[int]:
    """The ranks that `rank` connects to: the next two, and every power of 8 further on.

    The next two keep the ring whole when one dies; the long links let a message reach 4,096 ranks in about a dozen
    hops. Every rank knows every other's successors without asking.
    """
    distances, far = [1, 2], 8
    while far < size:
        distances.append(far)
        far *= 8
    return [other for other in dict.fromkeys((rank + distance) % size for distance in distances) if other != rank]


def process_start(pid: int) -> str:
    """When process `pid` started, in clock ticks since boot; empty where it is gone or the system does not tell."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[19]
    except OSError:
        return ""


class Link:
    """One side of a connection. `post` may be called by any thread; `receive` and `flush` by the watching one."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.rank = -1  # of the peer, once known
        self.order = 0  # how soon this side speaks up when the peer falls silent: 0 first
        self.heard = time.monotonic()
        self.stage = "start"
        self.step = 0
        self.said_goodbye = False
        self._lock = threading.Lock()
        self._out = b""
        self._in = b""

    def post(self, message: dict[str, Any], droppable: bool = False) -> None:
        """Queue a message and send what the socket takes at once. A droppable one is skipped while others wait."""
        with self._lock:
            if droppable and self._out:
                return
            self._out += json.dumps(message).encode() + b"\n"
            self._send()

    def flush(self) -> bool:
        """Send on; whether all is sent (or cannot be: the peer is gone)."""
        with self._lock:
            self._send()
            return not self._out

    def _send(self) -> None:
        try:
            while self._out:
                self._out = self._out[self.sock.send(self._out) :]
        except BlockingIOError:
            return
        except OSError:  # the peer is gone; reading notices it, too
            self._out = b""

    def receive(self) -> tuple[list[dict[str, Any]], bool]:
        """The messages that have come, and whether the connection is at its end."""
        ended = False
        try:
            while chunk := self.sock.recv(65536):
                self._in += chunk
            ended = True
        except BlockingIOError:
            pass
        except OSError:
            ended = True
        *lines, self._in = self._in.split(b"\n")
        if len(self._in) > _LIMIT:
            return [], True
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:  # a stranger on our port
            return [], True
        return [message for message in messages if isinstance(message, dict)], ended
