"""Log-probability and entropy of tokens from hidden states, without a [tokens, vocabulary] tensor.

The logits of one chunk of hidden states and one block of the vocabulary exist at a time; a running maximum and running
sums per state join the blocks (Milakov and Gimelshein, 2018, arXiv:1805.02867). The backward pass computes the logits
again, but for some that were kept. With z = logits / temperature, p = softmax(z) and H the entropy:

    d log p_t / dz_j = [j = t] - p_j        dH / dz_j = -p_j (log p_j + H)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

KEPT_BYTES = 1 << 27
VOCABULARY_BLOCK = {"cpu": 2048, "cuda": 16384}  # a CPU block stays in the cache; a GPU wants few, large kernels


def token_logprobs(
    hidden_UH: Tensor,
    weight_VH: Tensor,
    target_R: Tensor,
    row_R: Tensor | None = None,
    *,
    temperature: float = 1.0,
    bias_V: Tensor | None = None,
    chunk: int = 1024,
    vocabulary_block: int = 0,
    kept_bytes: int = KEPT_BYTES,
) -> tuple[Tensor, Tensor]:
    """float32 [R], float32 [R]: log-probability of `target_R` (int64 [R]), and entropy in nats, under
    softmax(logits / temperature) of the hidden state `row_R` (int64 [R]; default: each its own, in order).

    hidden_UH, weight_VH, bias_V: of one float dtype, in which the products are made; all else is float32 (or float64,
    where they are). At most `chunk` x `vocabulary_block` logits (0: what suits the device) are in work at one time.
    kept_bytes: logits of so many bytes wait for the backward pass, which need not compute those again.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0 for log-probabilities, not {temperature}")
    work = _Work(
        temperature,
        chunk,
        vocabulary_block or VOCABULARY_BLOCK[hidden_UH.device.type],
        kept_bytes if torch.is_grad_enabled() else 0,
        {},
    )
    if row_R is None:
        row_R = torch.arange(len(target_R), device=target_R.device)
    order_R = row_R.argsort(stable=True)  # so that a chunk's targets lie together
    picked_R, entropy_U = _TokenLogprobs.apply(hidden_UH, weight_VH, bias_V, target_R[order_R], row_R[order_R], work)
    return torch.zeros_like(picked_R).scatter(0, order_R, picked_R), entropy_U[row_R]


@dataclass
class _Work:
    """Settings of one call, and the logits kept for its backward pass, by (first row, first column)."""

    temperature: float
    chunk: int
    block: int
    room: int  # bytes that may still be kept
    kept: dict[tuple[int, int], Tensor]


class _TokenLogprobs(torch.autograd.Function):
    """hidden [U, H], weight [V, H], bias [V] or None, targets and rows [R] sorted by row -> log-probabilities [R],
    entropies [U]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_UH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        target_R: Tensor,
        row_R: Tensor,
        work: _Work,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        logits = _Logits(hidden_UH, weight_VH, bias_V, work)
        peak_U = hidden_UH.new_full((len(hidden_UH),), float("-inf"), dtype=logits.dtype)  # largest z so far
        mass_U = torch.zeros_like(peak_U)  # sum of exp(z - peak)
        moment_U = torch.zeros_like(peak_U)  # sum of exp(z - peak) * (z - peak)
        picked_R = torch.zeros(len(target_R), dtype=logits.dtype, device=target_R.device)  # z of the target
        for chunk in _chunks(row_R, len(hidden_UH), work.chunk):
            peak, mass, moment = (x[chunk.first : chunk.last] for x in (peak_U, mass_U, moment_U))
            for v0, v1 in _ranges(len(weight_VH), work.block):
                z = logits(chunk.first, chunk.last, v0, v1)
                where, inside = chunk.targets(target_R, v0, v1)
                picked_R[chunk.entries] += z[chunk.row, where].masked_fill(~inside, 0.0)
                higher = torch.maximum(peak, z.amax(1))
                # Before the first block the sums are 0 and the peak is -inf: no shift then, not -inf * 0.
                shift = torch.where(peak.isinf(), 0.0, peak - higher)
                moment.add_(mass * shift).mul_(shift.exp())
                mass.mul_(shift.exp())
                z.sub_(higher[:, None])
                e = z.exp()
                mass.add_(e.sum(1))
                moment.add_(torch.einsum("rv,rv->r", e, z))
                peak.copy_(higher)
        lse_U = peak_U + mass_U.log()
        entropy_U = mass_U.log() - moment_U / mass_U
        ctx.save_for_backward(hidden_UH, weight_VH, bias_V, target_R, row_R, lse_U, entropy_U)
        ctx.work = work
        return picked_R - lse_U[row_R], entropy_U

    @staticmethod
    def backward(ctx: Any, grad_logprob_R: Tensor | None, grad_entropy_U: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_UH, weight_VH, bias_V, target_R, row_R, lse_U, entropy_U = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        work = ctx.work
        work.room = 0  # what is computed again is not needed once more
        logits = _Logits(hidden_UH, weight_VH, bias_V, work)
        if grad_logprob_R is None:
            grad_logprob_R = torch.zeros(len(target_R), dtype=logits.dtype, device=target_R.device)
        grad_logprob_U = torch.zeros_like(lse_U).index_add_(0, row_R, grad_logprob_R)
        d_hidden = torch.zeros(hidden_UH.shape, dtype=logits.dtype, device=hidden_UH.device) if wants_hidden else None
        d_weight = torch.zeros_like(weight_VH) if wants_weight else None
        d_bias = torch.zeros_like(bias_V) if wants_bias and bias_V is not None else None
        chunks = list(_chunks(row_R, len(hidden_UH), work.chunk))
        for v0, v1 in _ranges(len(weight_VH), work.block):
            weight_sum, bias_sum = None, None
            for chunk in chunks:
                rows = slice(chunk.first, chunk.last)
                # d loss / dz = sum over targets g_l [j = t] - g_l p - g_H p (log p + H), with log p = z - lse.
                g_logprob = grad_logprob_U[rows, None]
                log_p = logits(chunk.first, chunk.last, v0, v1).sub_(lse_U[rows, None])
                if grad_entropy_U is None:
                    dz = log_p.exp_().mul_(-g_logprob)
                else:
                    p = log_p.exp()
                    dz = log_p.add_(entropy_U[rows, None]).mul_(grad_entropy_U[rows, None])
                    dz = dz.add_(g_logprob).mul_(p).neg_()
                where, inside = chunk.targets(target_R, v0, v1)
                dz.index_put_((chunk.row, where), grad_logprob_R[chunk.entries] * inside, accumulate=True)
                dlogits = dz.mul_(1.0 / work.temperature)
                if d_bias is not None:
                    bias_sum = dlogits.sum(0) if bias_sum is None else bias_sum.add_(dlogits.sum(0))
                dlogits = dlogits.to(weight_VH.dtype)
                if d_hidden is not None:
                    d_hidden[rows] += dlogits @ weight_VH[v0:v1]
                if d_weight is not None:
                    # Rounded to the weight's dtype once, after the sum over all chunks.
                    part = dlogits.t() @ hidden_UH[rows]
                    weight_sum = part.to(logits.dtype) if weight_sum is None else weight_sum.add_(part)
            if d_weight is not None and weight_sum is not None:
                d_weight[v0:v1] = weight_sum
            if d_bias is not None and bias_sum is not None:
                d_bias[v0:v1] = bias_sum
        return d_hidden.to(hidden_UH.dtype) if d_hidden is not None else None, d_weight, d_bias, None, None, None


@dataclass(frozen=True)
class _Chunk:
    """Hidden states `first:last`, the targets `entries` that they predict, and each one's row within the chunk."""

    first: int
    last: int
    entries: slice
    row: Tensor

    def targets(self, target_R: Tensor, v0: int, v1: int) -> tuple[Tensor, Tensor]:
        """int64, clamped into the block v0:v1; bool, whether the target lies in it."""
        index = target_R[self.entries] - v0
        return index.clamp(0, v1 - v0 - 1), (index >= 0) & (index < v1 - v0)


def _chunks(row_R: Tensor, size: int, step: int) -> Iterator[_Chunk]:
    ranges = list(_ranges(size, step))
    ends = torch.searchsorted(row_R, torch.tensor([last for _, last in ranges], device=row_R.device)).tolist()
    for (first, last), begin, end in zip(ranges, [0, *ends], ends, strict=False):
        yield _Chunk(first, last, slice(begin, end), row_R[begin:end] - first)


def _ranges(size: int, step: int) -> Iterator[tuple[int, int]]:
    return ((first, min(first + step, size)) for first in range(0, size, step))


class _Logits:
    """Logits of any chunk and block, divided by the temperature; `dtype` is that of everything but the products."""

    def __init__(self, hidden_UH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, work: _Work) -> None:
        self.hidden_UH, self.weight_VH, self.bias_V, self.work = hidden_UH, weight_VH, bias_V, work
        self.dtype = torch.float64 if hidden_UH.dtype == torch.float64 else torch.float32

    def __call__(self, r0: int, r1: int, v0: int, v1: int) -> Tensor:
        """[r1 - r0, v1 - v0]; the caller may overwrite it."""
        work = self.work
        product = work.kept.pop((r0, v0), None)
        if product is None:
            bias = None if self.bias_V is None else self.bias_V[v0:v1]
            product = F.linear(self.hidden_UH[r0:r1], self.weight_VH[v0:v1], bias)
        keep = product.nbytes <= work.room
        if keep:
            work.kept[r0, v0] = product
            work.room -= product.nbytes
        z = product.to(self.dtype, copy=keep)
        return z if work.temperature == 1.0 else z.mul_(1.0 / work.temperature)
