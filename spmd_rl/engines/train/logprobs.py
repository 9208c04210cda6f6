"""Log-probability and entropy of tokens from hidden states, without a [tokens, vocabulary] tensor.

The logits of one chunk of tokens and one block of the vocabulary exist at a time; a running maximum and running
sums per token join the blocks (Milakov and Gimelshein, 2018, arXiv:1805.02867). The backward pass computes the logits
again, but for some that were kept. With z = logits / temperature, p = softmax(z) and H the entropy:

    d log p_t / dz_j = [j = t] - p_j        dH / dz_j = -p_j (log p_j + H)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

KEPT_BYTES = 1 << 27
VOCABULARY_BLOCK = {"cpu": 2048, "cuda": 16384}  # a CPU block stays in the cache; a GPU wants few, large kernels


def token_logprobs(
    hidden_RH: Tensor,
    weight_VH: Tensor,
    target_R: Tensor,
    temperature: float = 1.0,
    bias_V: Tensor | None = None,
    chunk: int = 1024,
    vocabulary_block: int = 0,
    kept_bytes: int = KEPT_BYTES,
) -> tuple[Tensor, Tensor]:
    """float32 [R], float32 [R]: log-probability of `target_R` (int64 [R]), and entropy in nats, under
    softmax(logits / temperature).

    hidden_RH, weight_VH, bias_V: of one float dtype, in which the products are made; all else is float32 (or float64,
    where they are). At most `chunk` x `vocabulary_block` logits (0: what suits the device) are in work at one time.
    kept_bytes: logits of so many bytes wait for the backward pass, which need not compute those again.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0 for log-probabilities, not {temperature}")
    block = vocabulary_block or VOCABULARY_BLOCK[hidden_RH.device.type]
    kept_bytes = kept_bytes if torch.is_grad_enabled() else 0
    return _TokenLogprobs.apply(hidden_RH, weight_VH, bias_V, target_R, temperature, chunk, block, kept_bytes)


def _ranges(size: int, step: int) -> Iterator[tuple[int, int]]:
    return ((first, min(first + step, size)) for first in range(0, size, step))


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        target_R: Tensor,
        temperature: float,
        chunk: int,
        block: int,
        kept_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        work = _Logits(hidden_RH, weight_VH, bias_V, target_R, temperature, {}, kept_bytes)
        rows = target_R.shape[0]
        peak_R = hidden_RH.new_full((rows,), float("-inf"), dtype=work.dtype)  # largest z so far
        mass_R = torch.zeros_like(peak_R)  # sum of exp(z - peak)
        moment_R = torch.zeros_like(peak_R)  # sum of exp(z - peak) * (z - peak)
        picked_R = torch.zeros_like(peak_R)  # z of the target
        for r0, r1 in _ranges(rows, chunk):
            peak, mass, moment = peak_R[r0:r1], mass_R[r0:r1], moment_R[r0:r1]
            for v0, v1 in _ranges(weight_VH.shape[0], block):
                z = work.logits(r0, r1, v0, v1)
                index, inside = work.targets(r0, r1, v0, v1)
                picked_R[r0:r1] += z.gather(1, index[:, None])[:, 0].masked_fill(~inside, 0.0)
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
        lse_R = peak_R + mass_R.log()
        entropy_R = mass_R.log() - moment_R / mass_R
        ctx.save_for_backward(hidden_RH, weight_VH, bias_V, target_R, lse_R, entropy_R)
        ctx.temperature, ctx.chunk, ctx.block, ctx.kept = temperature, chunk, block, work.kept
        return picked_R - lse_R, entropy_R

    @staticmethod
    def backward(ctx: Any, grad_logprob_R: Tensor | None, grad_entropy_R: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_RH, weight_VH, bias_V, target_R, lse_R, entropy_R = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        work = _Logits(hidden_RH, weight_VH, bias_V, target_R, ctx.temperature, ctx.kept, room=0)
        if grad_logprob_R is None:
            grad_logprob_R = torch.zeros_like(lse_R)
        d_hidden = torch.zeros(hidden_RH.shape, dtype=work.dtype, device=hidden_RH.device) if wants_hidden else None
        d_weight = torch.empty_like(weight_VH) if wants_weight else None
        d_bias = torch.empty_like(bias_V) if wants_bias and bias_V is not None else None
        for v0, v1 in _ranges(weight_VH.shape[0], ctx.block):
            block_weight = torch.zeros(0, dtype=work.dtype)
            block_bias = torch.zeros((), dtype=work.dtype, device=hidden_RH.device)
            for r0, r1 in _ranges(target_R.shape[0], ctx.chunk):
                # d loss / dz = g_l ([j = t] - p) - g_H p (log p + H), with log p = z - lse.
                g_logprob = grad_logprob_R[r0:r1, None]
                log_p = work.logits(r0, r1, v0, v1).sub_(lse_R[r0:r1, None])
                if grad_entropy_R is None:
                    dz = log_p.exp_().mul_(-g_logprob)
                else:
                    g_entropy = grad_entropy_R[r0:r1, None]
                    p = log_p.exp()
                    dz = log_p.add_(entropy_R[r0:r1, None]).mul_(g_entropy).add_(g_logprob).mul_(p).neg_()
                index, inside = work.targets(r0, r1, v0, v1)
                dz.scatter_add_(1, index[:, None], g_logprob * inside[:, None])
                dlogits = dz.mul_(1.0 / ctx.temperature)
                if d_bias is not None:
                    block_bias = block_bias + dlogits.sum(0)
                dlogits = dlogits.to(weight_VH.dtype)
                if d_hidden is not None:
                    d_hidden[r0:r1] += dlogits @ weight_VH[v0:v1]
                if d_weight is not None:
                    # Rounded to the weight's dtype once, after the sum over all chunks.
                    part = dlogits.t() @ hidden_RH[r0:r1]
                    block_weight = part.to(work.dtype) if r0 == 0 else block_weight.add_(part)
            if d_weight is not None:
                d_weight[v0:v1] = block_weight if target_R.shape[0] else 0.0
            if d_bias is not None:
                d_bias[v0:v1] = block_bias
        return d_hidden.to(hidden_RH.dtype) if d_hidden is not None else None, d_weight, d_bias, *[None] * 5


class _Logits:
    """Logits of any chunk and block; `dtype` is that of everything but the products.

    kept: logits by (first row, first column), each handed out once; room: bytes that may still be added to them.
    """

    def __init__(
        self,
        hidden_RH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        target_R: Tensor,
        temperature: float,
        kept: dict[tuple[int, int], Tensor],
        room: int,
    ) -> None:
        self.hidden_RH, self.weight_VH, self.bias_V, self.target_R = hidden_RH, weight_VH, bias_V, target_R
        self.temperature, self.kept, self.room = temperature, kept, room
        self.dtype = torch.float64 if hidden_RH.dtype == torch.float64 else torch.float32

    def logits(self, r0: int, r1: int, v0: int, v1: int) -> Tensor:
        """[r1 - r0, v1 - v0], divided by the temperature; the caller may overwrite it."""
        product = self.kept.pop((r0, v0), None)
        if product is None:
            bias = None if self.bias_V is None else self.bias_V[v0:v1]
            product = F.linear(self.hidden_RH[r0:r1], self.weight_VH[v0:v1], bias)
        keep = product.nbytes <= self.room
        if keep:
            self.kept[r0, v0] = product
            self.room -= product.nbytes
        z = product.to(self.dtype, copy=keep)
        return z if self.temperature == 1.0 else z.mul_(1.0 / self.temperature)

    def targets(self, r0: int, r1: int, v0: int, v1: int) -> tuple[Tensor, Tensor]:
        """int64 [rows], clamped into the block; bool [rows], whether the target lies in it."""
        index = self.target_R[r0:r1] - v0
        inside = (index >= 0) & (index < v1 - v0)
        return index.clamp(0, v1 - v0 - 1), inside
