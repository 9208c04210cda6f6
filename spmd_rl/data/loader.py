"""The prompt loader: every rank knows the whole order; one rank of each slot reads the slot's rows, and no others.

What a step holds is a pure function of configuration, rows, and the position (epoch, cursor); neither the number of
slots nor that of ranks enters it. Prompts are read and tokenised one step ahead, in one thread of the loader's own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from spmd_rl.comm.world import World
from spmd_rl.config.errors import UserError
from spmd_rl.config.schema import Config
from spmd_rl.data.batch import Batch, Column
from spmd_rl.data.order import Order
from spmd_rl.data.prompts import PromptEncoder
from spmd_rl.data.screen import Screening, screen
from spmd_rl.data.sources import Sources, check_apart, row_bytes

EVAL_EPOCH = -1  # in the identities of evaluation samples

log = logging.getLogger(__name__)


class Position(NamedTuple):
    """epoch: passes over the training rows that are done; cursor: prompts taken from the current one."""

    epoch: int
    cursor: int


class Prompt(NamedTuple):
    """number: within the epoch, see `Order`; tokens: ids; row: UTF-8 JSON."""

    number: int
    tokens: list[int]
    row: bytes


class PromptLoader:
    """Prompts for training and evaluation. Its making is collective over `group` (default: the whole world).

    tokenizer: of transformers; rows, eval_rows: opened from `config.data` where not given. Raises UserError, before
    anything else is loaded, for data that can't be used: see sources.py, prompts.py and screen.py.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        world: World | None = None,
        *,
        group: ProcessGroup | None = None,
        rows: Sources | None = None,
        eval_rows: Sources | None = None,
    ) -> None:
        data, train = config.data, config.train
        if group is None and world is not None:
            group = world.control
        for key in ("prompts_per_step", "samples_per_prompt"):
            if getattr(train, key) < 1:
                raise UserError(f"train.{key}={getattr(train, key)}: at least 1 is wanted")
        check_apart(data.train, data.eval)
        self._config = config
        self._encoder = PromptEncoder(tokenizer, data)
        self._rows = Sources.open(data.train, "data.train") if rows is None else rows
        self._eval_rows = Sources.open(data.eval, "data.eval") if eval_rows is None else eval_rows
        if not len(self._rows):
            raise UserError("data.train is empty: name at least one source (path: or generator:)")
        screened = screen(self._rows, self._encoder, data.curriculum, group)
        eval_screened = screen(self._eval_rows, self._encoder, "", group)
        weights = [part.config.weight for part in self._rows.parts]
        self._order = Order(
            self._rows.starts, screened.overlong, weights, config.run.seed, data.shuffle, screened.values_N
        )
        held_out = self._eval_rows.starts
        self._eval_orders = [
            Order(held_out[i : i + 2], [out], [1.0], config.run.seed, shuffle=False)
            for i, out in enumerate(eval_screened.overlong)
        ]
        self.position = Position(0, 0)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="loader")
        self._ahead: dict[tuple[Position, int | None, int], Future[Batch]] = {}
        if group is None or dist.get_rank(group) == 0:
            self._say("training", self._rows, screened)
            self._say_if_small()
            self._say("evaluation", self._eval_rows, eval_screened)

    @property
    def epoch_length(self) -> int:
        """Prompts in one epoch, over all ranks."""
        return self._order.length

    @property
    def exhausted(self) -> bool:
        """Whether `data.epochs` are done; `batch` gives no more then."""
        return self._is_end(self.position)

    def batch(self, slot: int | None, slots: int) -> Batch:
        """The prompts that data-parallel slot `slot` of `slots` has in the next step; the position moves on by a step.

        slot: None on a rank that reads for no slot, such as a tensor-parallel peer; it gets none and only keeps count.
        A step never crosses the end of an epoch: the last one of an epoch may be smaller, and a slot may get nothing.
        Columns: `prompt` int32 tokens; `row` UTF-8 JSON; `turn` int32 scalar, which of the step's updates trains on
        the group. Each prompt comes `samples_per_prompt` times. Raises RuntimeError when exhausted.
        """
        if self.exhausted:
            raise RuntimeError(f"all {self._config.data.epochs} epochs are done")
        batch = self._start(self.position, slot, slots).result()
        self.position = self.after(self.position)
        self._ahead.clear()
        if not self.exhausted:
            self._ahead[self.position, slot, slots] = self._start(self.position, slot, slots)
        return batch

    def batch_at(self, position: Position, slot: int | None, slots: int) -> Batch:
        """What `batch` gives at `position`; moves nothing."""
        return self._start(position, slot, slots).result()

    def foresee(self, position: Position, slot: int, slots: int) -> None:
        """Begin to read what `batch_at` will probably be asked for next."""
        self._ahead = {(position, slot, slots): self._start(position, slot, slots)}

    def places(self, position: Position, slot: int, slots: int) -> dict[int, int]:
        """Prompt number → its place in the epoch, of the prompts that `batch_at` gives."""
        count = min(self._config.train.prompts_per_step, self.epoch_length - position.cursor)
        first, last = (position.cursor + place * count // slots for place in (slot, slot + 1))
        numbers = self._order.prompts(position.epoch, first, last).tolist()
        return {number: first + i for i, number in enumerate(numbers)}

    def after(self, position: Position) -> Position:
        """The position one step on."""
        cursor = position.cursor + self._config.train.prompts_per_step
        return Position(position.epoch, cursor) if cursor < self.epoch_length else Position(position.epoch + 1, 0)

    def eval_batches(self, slot: int | None, slots: int) -> dict[str, Batch]:
        """This slot's part of each evaluation source, by its name; the same at every call. slot: as in `batch`.

        Identities are (-1, row number over all evaluation sources, sample); columns `prompt` and `row`; each prompt
        comes `eval.samples_per_prompt` times, or once where evaluation is greedy.
        """
        evaluation = self._config.eval
        samples = evaluation.samples_per_prompt if evaluation.temperature > 0 else 1
        batches = {}
        for part, order in zip(self._eval_rows.parts, self._eval_orders, strict=True):
            prompts = order.prompts(0, *_part(slot, slots, order.length)).tolist()
            read = self._thread.submit(self._read, self._eval_rows, prompts).result()
            batches[part.config.name] = _assemble(EVAL_EPOCH, read, samples)
        return batches

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.position.epoch, "cursor": self.position.cursor, "epoch_length": self.epoch_length}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where `state` was taken, on any number of ranks. Raises UserError where the data is not the same."""
        if int(state["epoch_length"]) != self.epoch_length:
            raise UserError(
                f"the checkpoint's training data had {int(state['epoch_length'])} prompts in an epoch, now there are "
                f"{self.epoch_length}: give the same data, or start anew with run.resume=none"
            )
        self.position = Position(int(state["epoch"]), int(state["cursor"]))
        self._ahead.clear()

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _is_end(self, position: Position) -> bool:
        return 0 < self._config.data.epochs <= position.epoch

    def _start(self, position: Position, slot: int | None, slots: int) -> Future[Batch]:
        if slot is not None and not 0 <= slot < slots:
            raise ValueError(f"slot {slot} of {slots}")
        ahead = self._ahead.get((position, slot, slots))
        return ahead or self._thread.submit(self._load, position, slot, slots)

    def _load(self, position: Position, slot: int | None, slots: int) -> Batch:
        train = self._config.train
        epoch, cursor = position
        count = min(train.prompts_per_step, self.epoch_length - cursor)
        first, last = _part(slot, slots, count)
        places = range(first, last)
        prompts = self._order.prompts(epoch, cursor + first, cursor + last).tolist()
        read = self._read(self._rows, prompts)
        # Updates take turns within each slot, so that every one of them finds work on every rank.
        turn = {prompt: place % train.updates_per_step for prompt, place in zip(prompts, places, strict=True)}
        turns = [turn[prompt.number] for prompt in read for _ in range(train.samples_per_prompt)]
        batch = _assemble(epoch, read, train.samples_per_prompt)
        return batch.with_columns({"turn": Column.scalars(torch.tensor(turns, dtype=torch.int32))})

    def _read(self, rows: Sources, prompts: list[int]) -> list[Prompt]:
        """The prompts of these indices that are short enough."""
        limit = self._config.data.max_prompt_tokens
        read = []
        for index in prompts:
            source, i = rows.locate(index % len(rows))
            row, where = source.row(i), source.where(i)
            tokens = self._encoder.encode(source, row, where)
            if len(tokens) <= limit:
                read.append(Prompt(index, tokens, row_bytes(row, where)))
            else:  # only in sets too large to be screened
                log.warning("%s: left out, %d tokens (data.max_prompt_tokens=%d)", where, len(tokens), limit)
        return read

    def _say(self, purpose: str, rows: Sources, screened: Screening) -> None:
        overlong = sum(out.size for out in screened.overlong)
        out = f", {overlong} left out (more than {self._config.data.max_prompt_tokens} tokens)" if overlong else ""
        log.info("%s prompts: %d in %d sources%s", purpose, len(rows) - overlong, len(rows.parts), out)

    def _say_if_small(self) -> None:
        wanted, there = self._config.train.prompts_per_step, self.epoch_length
        if wanted > there:
            log.warning(
                "train.prompts_per_step=%d, but an epoch has only %d prompts: each step trains on all of them, once",
                wanted, there,
            )  # fmt: skip


def _part(slot: int | None, slots: int, count: int) -> tuple[int, int]:
    """Where the part of `slot` in `count` prompts begins and ends."""
    return (0, 0) if slot is None else (slot * count // slots, (slot + 1) * count // slots)


def _assemble(epoch: int, read: list[Prompt], samples: int) -> Batch:
    """Each prompt `samples` times, one after the other."""
    repeated = [(prompt, sample) for prompt in read for sample in range(samples)]
    ids = [(epoch, prompt.number, sample) for prompt, sample in repeated]
    tokens = [torch.tensor(prompt.tokens, dtype=torch.int32) for prompt, _ in repeated]
    return Batch(
        torch.tensor(ids, dtype=torch.int64).reshape(-1, 3),
        {
            "prompt": Column.from_rows(tokens, torch.int32),
            "row": Column.from_bytes([prompt.row for prompt, _ in repeated]),
        },
    )
