"""From logits to a token and its log-probability: pure tensors, one row per sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spmd_rl.engines.protocol import Sampling


def processed_logprobs(logits_BV: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """float32 [B, V]: logarithms of the probabilities that tokens are drawn from.

    The definition is that of vLLM's `processed_logprobs`: logits divided by the temperature; then all but the `top_k`
    greatest, and all behind the smallest set of greatest whose probability reaches `top_p`, become -inf; then
    normalised again. A greedy row has the log-probabilities of temperature 1, with nothing cut off.
    """
    logits_BV = logits_BV.float()
    device = logits_BV.device
    temperature_B = torch.tensor([s.temperature or 1.0 for s in samplings], device=device)
    if bool((temperature_B != 1).any()):
        logits_BV = logits_BV / temperature_B[:, None]
    filtered = [i for i, s in enumerate(samplings) if s.temperature > 0 and (s.top_k > 0 or s.top_p < 1)]
    if filtered:
        rows_F = torch.tensor(filtered, device=device)
        logits_BV = logits_BV.clone()
        logits_BV[rows_F] = _cut_off(logits_BV[rows_F], [samplings[i] for i in filtered])
    return logits_BV.log_softmax(dim=-1)


def _cut_off(logits_FV: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """[F, V]: -inf where top_k or top_p exclude a token."""
    vocabulary = logits_FV.shape[-1]
    device = logits_FV.device
    sorted_FV, order_FV = logits_FV.sort(dim=-1, descending=True, stable=True)
    top_k_F = torch.tensor([min(s.top_k, vocabulary) if s.top_k > 0 else vocabulary for s in samplings], device=device)
    least_F1 = sorted_FV.gather(-1, top_k_F[:, None] - 1)
    sorted_FV = sorted_FV.masked_fill(sorted_FV < least_F1, float("-inf"))  # ties of the k-th stay, as in vLLM
    top_p_F = torch.tensor([s.top_p for s in samplings], dtype=torch.float64, device=device)
    probs_FV = sorted_FV.softmax(dim=-1).double()
    above_FV = probs_FV.cumsum(dim=-1) - probs_FV  # probability of all greater ones
    drop_FV = (above_FV >= top_p_F[:, None]) & (top_p_F < 1)[:, None]
    drop_FV[:, 0] = False
    return torch.empty_like(sorted_FV).scatter_(-1, order_FV, sorted_FV.masked_fill(drop_FV, float("-inf")))


def draw_tokens(logprobs_BV: Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]) -> Tensor:
    """int64 [B]: the greatest, where the row is greedy; else by inversion of the cumulative distribution.

    uniforms: one number in [0, 1) per row; the only randomness. A row of NaN yields some valid id, whose
    log-probability then is NaN too.
    """
    device = logprobs_BV.device
    token_B = logprobs_BV.nan_to_num(nan=float("-inf")).argmax(dim=-1)
    drawn = [i for i, s in enumerate(samplings) if s.temperature > 0]
    if drawn:
        rows_D = torch.tensor(drawn, device=device)
        cumulative_DV = logprobs_BV[rows_D].exp().cumsum(dim=-1, dtype=torch.float64)
        uniform_D1 = torch.tensor([[uniforms[i]] for i in drawn], dtype=torch.float64, device=device)
        total_D1 = cumulative_DV[:, -1:]
        # The first entry above a threshold below the total: a token of probability 0 is never drawn.
        threshold_D1 = torch.minimum(uniform_D1 * total_D1, total_D1.nextafter(torch.zeros_like(total_D1)))
        drawn_D1 = torch.searchsorted(cumulative_DV, threshold_D1, right=True)
        token_B[rows_D] = drawn_D1[:, 0].clamp(max=logprobs_BV.shape[-1] - 1)
    return token_B
