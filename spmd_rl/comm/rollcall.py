"""Who did not come? Asked only after a collective has failed; nothing is written while all goes well."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

_CONNECT_S = 2.0


class RollCall:
    """Says, for the ranks of one channel, who has come how far.

    The place to leave word is the rendezvous store of the job, which every rank can reach by MASTER_ADDR and
    MASTER_PORT. name: tells this channel's ranks from another's.
    """

    def __init__(self, name: str, ranks: Sequence[int], rank: int) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.rank = rank
        self._store: dist.Store | None = None

    def present(self, call: int) -> None:
        """Leave word that this rank has come to the channel's call number `call`."""
        with contextlib.suppress(dist.DistError, RuntimeError, OSError, KeyError, ValueError):
            self._open().set(str(self.rank), str(call))

    def absent(self, call: int, grace_s: float = 2.0) -> list[int] | None:
        """The ranks that leave no word within `grace_s` of having come to `call`; None where that cannot be known."""
        self.present(call)
        missing = [rank for rank in self.ranks if rank != self.rank]
        until = time.monotonic() + grace_s
        try:
            store = self._open()
            while missing and time.monotonic() < until:
                missing = [rank for rank in missing if not store.check([str(rank)]) or int(store.get(str(rank))) < call]
                time.sleep(0.05)
        except (dist.DistError, RuntimeError, OSError, KeyError, ValueError):
            return None
        return missing

    def say(self, call: int) -> str:
        """`; rank 3 did not come`, or nothing where that is not known or nobody is missing."""
        missing = self.absent(call)
        if not missing:
            return ""
        listed = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
        return f"; rank{'s' if len(missing) > 1 else ''} {listed} did not come"

    def _open(self) -> dist.Store:
        if self._store is None:
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = dist.TCPStore(host, port, None, False, timedelta(seconds=_CONNECT_S), wait_for_workers=False)
            self._store = dist.PrefixStore(f"rollcall/{self.name}", store)
        return self._store
