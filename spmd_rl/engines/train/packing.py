"""From a ragged batch to one row of tokens, in which what several samples have in common stands once.

The hidden state of a token depends on the tokens before it alone, so samples that begin alike need their common
beginning once: the n responses to a prompt its tokens, and all prompts the system prompt before them. The samples
become a tree of *nodes*; a token sees the nodes on the way to the root and what is before it in its own. Gradients add
up where samples meet, so the result is that of each sample alone. Without sharing, each sample is a root.

The last token of a response predicts nothing and is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spmd_rl.config.errors import UserError
from spmd_rl.data.batch import Batch

MIN_SHARED = 8  # tokens: a node costs attention calls of its own, so sharing less would not pay


class Node(NamedTuple):
    """Tokens `start : start + length` of the packed row, which follow those of node `parent` (-1: a root).

    Nodes are in depth-first order: `end` is where the last descendant ends.
    """

    start: int
    length: int
    parent: int
    end: int


@dataclass(frozen=True)
class Packed:
    """T packed tokens that predict R response tokens.

    input_ids_T, position_ids_T: int64 [T], T >= 1; predict_R: int64 [R], the packed token whose hidden state predicts
    each response token, in batch order; target_R: int64 [R], those tokens; nodes: cover the T tokens in order;
    tokens: T, or 0 where the batch has no response token and the one packed token is only there to be computed.
    """

    input_ids_T: Tensor
    position_ids_T: Tensor
    predict_R: Tensor
    target_R: Tensor
    nodes: tuple[Node, ...]
    tokens: int


def pack(batch: Batch, shared: bool, min_shared: int = MIN_SHARED) -> Packed:
    """Packs the columns `prompt` and `response`; samples share `min_shared` tokens or more, or all that they have.

    Raises UserError for a response without a prompt: nothing predicts its first token.
    """
    if len(batch) == 0 or batch["response"].values.numel() == 0:
        zero, none = torch.zeros(1, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
        return Packed(zero, zero, none, none, (Node(0, 1, -1, 1),), tokens=0)
    prompts, responses = batch["prompt"].rows(), batch["response"].rows()
    samples = [sample for sample, response in enumerate(responses) if len(response)]
    for sample in samples:
        if len(prompts[sample]) == 0:
            identity = tuple(batch.ids[sample].tolist())
            raise UserError(f"sample {identity} has an empty prompt; give it at least one token")
    sequences = [torch.cat([prompts[s], responses[s][:-1]]).cpu().numpy() for s in samples]
    tree = _Tree(sequences, min_shared)
    if shared:
        tree.grow(list(range(len(sequences))), depth=0, parent=-1)
    else:
        for i, sequence in enumerate(sequences):
            tree.add([i], 0, len(sequence), -1)
    predict = [tree.place_N[i][len(prompts[s]) - 1 :] for i, s in enumerate(samples)]
    return Packed(
        input_ids_T=torch.from_numpy(np.concatenate(tree.ids)).long(),
        position_ids_T=torch.from_numpy(np.concatenate(tree.positions)),
        predict_R=torch.from_numpy(np.concatenate(predict)),
        target_R=batch["response"].values.long(),
        nodes=tuple(tree.nodes),
        tokens=tree.total,
    )


class _Tree:
    """Grows depth first; `place_N[i]` is where each token of sequence i has come to lie."""

    def __init__(self, sequences: Sequence[NDArray[np.int32]], min_shared: int) -> None:
        self.sequences, self.min_shared = sequences, min_shared
        self.place_N = [np.zeros(len(s), dtype=np.int64) for s in sequences]
        self.ids: list[NDArray[np.int32]] = []
        self.positions: list[NDArray[np.int64]] = []
        self.nodes: list[Node] = []
        self.total = 0

    def add(self, members: Sequence[int], first: int, last: int, parent: int) -> int:
        """A node of the tokens `first:last`, which all `members` have; its number."""
        self.ids.append(self.sequences[members[0]][first:last])
        self.positions.append(np.arange(first, last))
        start, self.total = self.total, self.total + last - first
        for member in members:
            self.place_N[member][first:last] = np.arange(start, self.total)
        self.nodes.append(Node(start, last - first, parent, self.total))
        return len(self.nodes) - 1

    def grow(self, members: Sequence[int], depth: int, parent: int) -> None:
        """Nodes for what follows the first `depth` tokens, which all `members` have in common."""
        families: dict[bytes, list[int]] = {}
        for member in members:
            if len(rest := self.sequences[member][depth:]):
                families.setdefault(rest[: self.min_shared].tobytes(), []).append(member)
        for family in families.values():
            last = self._common(family, depth)
            node = self.add(family, depth, last, parent)
            self.grow(family, last, node)
            self.nodes[node] = self.nodes[node]._replace(end=self.total)

    def _common(self, members: Sequence[int], depth: int) -> int:
        """How many first tokens all `members` have in common; they have `depth`."""
        first, *others = (self.sequences[member] for member in members)
        last = len(first)
        for other in others:
            last = min(last, len(other))
            different = first[depth:last] != other[depth:last]
            if different.any():
                last = depth + int(different.argmax())
        return last
