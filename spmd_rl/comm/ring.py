"""The ring of ranks: who is linked with whom, and how messages go between them. What they say is `liveness`'s."""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from spmd_rl.comm.address import LOOPBACK, is_loopback
from spmd_rl.comm.link import Link, Peer, process_start, successors
from spmd_rl.comm.process import in_forked_children, machine
from spmd_rl.comm.world import World


class Ring:
    """This rank's links: to its successors, and from the ranks whose successor it is. Collective to make.

    `post` and `wake` may be called by any thread, all else by the one that takes turns.
    """

    def __init__(self, world: World) -> None:
        self._rank, self._size = world.rank, world.size
        self._listener = socket.create_server((world.address, 0), family=_family(world.address), backlog=64)
        self.peers, self._token = self._introduce(world)
        self.machine = self.peers[world.rank].machine
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_out.setblocking(False)
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        neighbours = successors(world.rank, world.size)
        self.links = [self._connect(world.address, rank, order) for order, rank in enumerate(neighbours)]
        self.awaited = len(neighbours)  # as many ranks connect to this one
        self.whole = threading.Event()  # they have
        if not neighbours:
            self.whole.set()
        in_forked_children(self.close)  # or our death would go unnoticed while a worker lives

    def post(self, message: dict[str, Any], droppable: bool = False) -> None:
        """To all neighbours."""
        for link in list(self.links):
            link.post(message, droppable)

    def wake(self) -> None:
        """End the turn that is being waited for."""
        with contextlib.suppress(OSError):
            self._wake_out.send(b"\0")

    def turn(self, wait_s: float) -> Iterator[tuple[Link, dict[str, Any] | None]]:
        """Wait at most `wait_s`, then each message that has come, and None of a link that has ended."""
        for key, _ in self._selector.select(max(0.0, wait_s)):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._wake_in:
                self._wake_in.recv(4096)
            else:
                yield from self._read(key.data)

    def hang_up(self) -> None:
        """Send what is queued, then close without resetting connections whose messages are still being read."""
        until = time.monotonic() + 0.3
        while time.monotonic() < until and not all([link.flush() for link in list(self.links)]):
            time.sleep(0.01)
        for link in self.links:
            with contextlib.suppress(OSError):
                link.sock.shutdown(socket.SHUT_WR)
        waiting = list(self.links)
        while waiting and time.monotonic() < until:
            waiting = [link for link in waiting if not link.receive()[1]]
            time.sleep(0.01)
        self.close()

    def close(self) -> None:
        for sock in (self._listener, self._wake_in, self._wake_out, *(link.sock for link in self.links)):
            sock.close()

    def _introduce(self, world: World) -> tuple[list[Peer], str]:
        """Every rank learns every other's address and process, once."""
        pid = os.getpid()
        me = Peer(
            rank=world.rank,
            host=socket.gethostname(),
            machine=machine(),
            pid=pid,
            started=process_start(pid),
            address=world.address,
            port=self._listener.getsockname()[1],
        )
        facts: list[Any] = [None] * world.size
        dist.all_gather_object(facts, (me, secrets.token_hex(8)), group=world.control)
        return [fact[0] for fact in facts], facts[0][1]

    def _connect(self, own_address: str, rank: int, order: int) -> Link:
        peer = self.peers[rank]
        same_host = is_loopback(own_address) and is_loopback(peer.address)
        sock = socket.create_connection((LOOPBACK if same_host else peer.address, peer.port), timeout=30.0)
        link = Link(sock)
        # The rank before the culprit speaks after those behind it.
        link.rank, link.order = rank, len(successors(rank, self._size)) + order
        link.post({"hello": self._rank, "token": self._token})
        self._selector.register(sock, selectors.EVENT_READ, link)
        return link

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        link = Link(sock)
        self._selector.register(sock, selectors.EVENT_READ, link)

    def _read(self, link: Link) -> Iterator[tuple[Link, dict[str, Any] | None]]:
        messages, ended = link.receive()
        link.heard = time.monotonic()
        for message in messages:
            if link.rank >= 0 or self._greets(link, message):
                yield link, message
        if ended:
            self._selector.unregister(link.sock)
            link.sock.close()
            if link in self.links:
                self.links.remove(link)
                yield link, None

    def _greets(self, link: Link, message: dict[str, Any]) -> bool:
        """Whether this is a neighbour's first word; a stranger's words go unheard."""
        rank = message.get("hello")
        if message.get("token") != self._token or not isinstance(rank, int):
            return False
        link.rank, link.order = rank, successors(rank, self._size).index(self._rank)
        self.links.append(link)
        self.awaited -= 1
        if self.awaited == 0:
            self.whole.set()
        return True


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
