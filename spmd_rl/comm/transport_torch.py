"""Channels over torch.distributed: NCCL for payloads on CUDA, gloo for the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ProcessGroup

from spmd_rl.comm.rollcall import RollCall
from spmd_rl.comm.scratch import Scratch
from spmd_rl.comm.transport import Inbox, Peers, TransportError
from spmd_rl.comm.world import World

Int64 = NDArray[np.int64]

_COPIED = 1 << 24  # bytes that a rank copies, at most, to save hops


class TorchTransport:
    name = "torch"

    def __init__(self, world: World, timeout_s: float) -> None:
        self.world = world
        self.timeout = timedelta(seconds=timeout_s)
        self._opened = 0

    def open(self, ranks: Sequence[int]) -> TorchChannel | None:
        ranks = sorted(ranks)
        self._opened += 1
        control = dist.new_group(ranks, timeout=self.timeout, backend="gloo")
        payload = control
        if self.world.device.type == "cuda":
            payload = dist.new_group(ranks, timeout=self.timeout, backend="nccl")
        if self.world.rank not in ranks:
            return None
        return TorchChannel(tuple(ranks), self.world, control, payload, self.timeout, self._opened)


class TorchChannel:
    """control: a gloo group for metadata; payload: the group for bytes on the world's device."""

    def __init__(
        self,
        ranks: tuple[int, ...],
        world: World,
        control: ProcessGroup,
        payload: ProcessGroup,
        timeout: timedelta,
        number: int,
    ) -> None:
        self.ranks = ranks
        self.peers: Peers | None = None
        self.rank = world.rank
        self._name, self._me = world.job_rank, world.job_rank()  # what messages call a rank
        self.control = control
        self.payload = payload
        self.timeout = timeout
        self._roll = RollCall(f"torch/{world.role}/{number}", [*map(world.job_rank, ranks)], world.job_rank())
        self._calls = 0
        self._scratch = Scratch(world.device)

    def all_gather(self, words_K: Int64) -> Int64:
        return self._gather_equal(torch.from_numpy(words_K)).numpy().reshape(len(self.ranks), -1)

    def all_gather_bytes(self, data: Tensor, sizes_N: Int64) -> Tensor:
        """The collective wants equal sizes. Where the ranks' sizes are far from equal (one rank may hold everything)
        padding would multiply the bytes by the world's size: then equal shares are made first, by an all-to-all."""
        count, total, largest = len(self.ranks), int(sizes_N.sum()), int(sizes_N.max())
        if total == 0:
            return torch.empty(0, dtype=torch.uint8)
        place = self.ranks.index(self.rank)
        if largest * count <= 2 * total + 4096 * count:
            share = torch.zeros(largest, dtype=torch.uint8)
            share[: data.numel()] = data
            gathered = self._gather_equal(share)
            return (
                gathered
                if largest * count == total
                else torch.cat(
                    [part[:size] for part, size in zip(gathered.split(largest), sizes_N.tolist(), strict=True)]
                )
            )
        per_rank = -(-total // count)
        begins = np.cumsum(sizes_N) - sizes_N
        shares = np.arange(count) * per_rank
        send = _overlap(int(begins[place]), int(sizes_N[place]), shares, np.full(count, per_rank))
        recv = _overlap(place * per_rank, per_rank, begins, sizes_N)
        share = torch.zeros(per_rank, dtype=torch.uint8)
        with self.named("all_to_all of metadata"):
            dist.all_to_all_single(share[: int(recv.sum())], data, recv.tolist(), send.tolist(), group=self.control)
        return self._gather_equal(share)[:total]

    def _gather_equal(self, share: Tensor) -> Tensor:
        """Gloo's all-gather is a ring: each rank waits for as many hops as there are ranks. As long as a copy for
        every peer is small, an all-to-all brings the same in a single hop."""
        count = len(self.ranks)
        gathered = torch.empty(count * share.numel(), dtype=share.dtype)
        with self.named("all_gather of metadata"):
            if gathered.numel() * gathered.element_size() <= _COPIED:
                dist.all_to_all_single(gathered, share.repeat(count), group=self.control)
            else:
                dist.all_gather_into_tensor(gathered, share, group=self.control)
        return gathered

    def broadcast(self, data: Tensor, root: int) -> None:
        with self.named("broadcast"):
            dist.broadcast(data, root, group=self.control)

    @property
    def allocated(self) -> int:
        return self._scratch.allocated

    def outbox(self, size: int) -> Tensor:
        return self._scratch.get("send", size)

    def all_to_all(self, outbox: Tensor, send_N: Int64, recv_N: Int64) -> TorchFlight:
        received = self._scratch.get("receive", int(recv_N.sum()))
        with self.named("all_to_all"):
            work = dist.all_to_all_single(
                received, outbox, recv_N.tolist(), send_N.tolist(), group=self.payload, async_op=True
            )
        return TorchFlight(self, work, Inbox.of(received, recv_N))

    def send(self, data: Tensor, ranks: Sequence[int]) -> None:
        self._point_to_point(lambda: [dist.isend(data, rank, group=self.payload) for rank in ranks], "send")

    def receive(self, data: Tensor, rank: int) -> None:
        self._point_to_point(
            lambda: [dist.irecv(data, rank, group=self.payload)], f"receive from rank {self._name(rank)}"
        )

    def _point_to_point(self, begin: Callable[[], list[dist.Work | None]], what: str) -> None:
        with self.named(what):
            for work in begin():
                if work is not None:
                    work.wait(self.timeout)

    @contextmanager
    def named(self, what: str) -> Iterator[None]:
        """Turns a failure into a TransportError that says what failed, where, and who did not come."""
        self._calls += 1
        try:
            yield
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            absent = self._roll.say(self._calls)
            raise TransportError(f"{what} failed on rank {self._me}: {reason}{absent}") from None


class TorchFlight:
    def __init__(self, channel: TorchChannel, work: dist.Work, inbox: Inbox) -> None:
        self._channel = channel
        self._work = work
        self._inbox = inbox

    def wait(self) -> Inbox:
        with self._channel.named("all_to_all"):
            self._work.wait(self._channel.timeout)
        return self._inbox


def _overlap(begin: int, size: int, begins_N: Int64, sizes_N: Int64) -> Int64:
    """int64 [N]: how many bytes of [begin, begin + size) lie in each of the other intervals."""
    end = np.minimum(begin + size, begins_N + sizes_N)
    return np.maximum(end - np.maximum(begin, begins_N), 0)
