"""`Producer`: a replica's end of the stream: which group next, room for it, and its way to the home trainer."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from spmd_rl.config.errors import UserError
from spmd_rl.data.batch import Batch
from spmd_rl.data.metadata import Schema
from spmd_rl.data.stream.admission import Starts
from spmd_rl.data.stream.channel import Bell, Inlet, Outlet
from spmd_rl.data.stream.codec import aligned, encode
from spmd_rl.data.stream.credits import Credits
from spmd_rl.data.stream.frames import Kind, Message
from spmd_rl.observe.metrics import Metrics

COST = ("prompt", "response")  # the columns whose tokens are counted
_AGELESS = 2**62  # version of a group without a sample: it cannot be too old
_WIDEST = 8  # bytes of one token in a column that is still to be made


class Producer:
    """columns: what the trainers want; longest: tokens of the longest response, which bounds columns to come;
    shared: the trainers compute the prompt of a group once, so it counts once."""

    def __init__(
        self,
        starts: Starts,
        limit: int,
        columns: tuple[str, ...],
        longest: int,
        line: tuple[Inlet, Outlet, Bell],
        shared: bool = False,
    ) -> None:
        self.starts, self.credits = starts, Credits(limit)
        self.ended = False  # the trainers want nothing more
        self.notes: list[Any] = []  # what the trainers have said beside
        self._columns, self._longest, self._shared = columns, longest, shared
        self._inlet, self._outlet, self._bell = line
        self._schemas: dict[int, int] = {}  # digest → number
        self._asked = False

    def largest(self, batch: Batch) -> int:
        """Bytes that a group which has come so far can have in the end, at most."""
        there = [name for name in self._columns if name in batch]
        size = encode(batch.only(there)).numel() + aligned(4 * len(batch) * len(self._columns))
        return size + (len(self._columns) - len(there)) * aligned(_WIDEST * self._longest * len(batch))

    def start(self, group: int, largest: int) -> bool:
        """Reserve room for the group that is next, and count it as started; False where there is no room at present."""
        try:
            if not self.credits.reserve(group, largest, self.starts.urgent(group)):
                return False
        except ValueError as error:
            raise UserError(f"stream.limit_mib is too small: {error}") from None
        self.starts.start(group)
        return True

    def deliver(self, group: int, batch: Batch, metrics: Metrics) -> None:
        """Send a finished group; returns at once."""
        part = batch.only(self._columns)
        block, schema = encode(part), Schema.of(part)
        messages: list[tuple[Message, torch.Tensor | None]] = []
        number = self._schemas.get(schema.digest)
        if number is None:
            number = self._schemas[schema.digest] = len(self._schemas)
            text = torch.frombuffer(bytearray(schema.encoded), dtype=torch.uint8)
            messages.append((Message(Kind.SCHEMA, text.numel(), schema=number), text))
        note = torch.frombuffer(bytearray(pickle.dumps(metrics)), dtype=torch.uint8)
        messages.append((Message(Kind.METRICS, note.numel(), group=group), note))
        try:
            self.credits.settle(group, block.numel())
        except ValueError as error:
            columns = ", ".join(f"{name} {part[name].values.nbytes}" for name in self._columns)
            raise UserError(f"a column is larger than {_WIDEST} bytes a token: {error} ({columns})") from None
        version = int(part["version"].values.min()) if len(part) else _AGELESS
        tokens = sum(int(part[name].lengths[: self._counted(name)].sum()) for name in COST if name in part)
        described = Message(
            Kind.GROUP, block.numel(), group, version, len(part), of=len(part), tokens=tokens, schema=number
        )
        self._outlet.put_all([*messages, (described, block)])

    def _counted(self, column: str) -> int | None:
        """How many samples of a group the tokens of a column are counted of."""
        return 1 if self._shared and column == COST[0] else None

    def tell(self, note: Any) -> None:
        """Anything that can be pickled, for the home trainer."""
        body = torch.frombuffer(bytearray(pickle.dumps(note)), dtype=torch.uint8)
        self._outlet.put(Message(Kind.NOTE, body.numel()), body)

    def ask_to_stop(self) -> None:
        """Let the trainers end the run after their present step, as if they had been asked to; once is enough."""
        if not self._asked:
            self._asked = True
            self._outlet.put(Message(Kind.STOP))

    def listen(self, timeout_s: float = 0.0) -> None:
        """Take in what the trainer has sent; wait for something, at most so long."""
        if timeout_s:
            self._bell.wait(timeout_s)
        for frame in self._inlet.take():
            for place, (kind, _, group, *_) in enumerate(frame.table.tolist()):
                if kind == Kind.RELEASE:
                    self.credits.release(group)
                elif kind == Kind.AGAIN:
                    self.credits.release(group)
                    self.starts.again(group)
                elif kind == Kind.FLAT:
                    self.starts.flat(group)
                elif kind == Kind.NOTE:
                    self.notes.append(pickle.loads(frame.body(place).numpy().tobytes()))
                elif kind == Kind.CLOSE:
                    self.ended = True

    def give_up(self, reason: str) -> None:
        """Nothing more will be made here; what is under way is for others to make."""
        body = torch.frombuffer(bytearray(reason.encode() or b"?"), dtype=torch.uint8)
        self._outlet.put(Message(Kind.LOST, body.numel()), body)

    @property
    def closing(self) -> bool:
        """Whether the trainers have ended the stream, also where nobody listens."""
        return self._inlet.closed

    def close(self, timeout_s: float) -> None:
        """After the trainers have ended the stream: say goodbye."""
        self._outlet.close(timeout_s)
