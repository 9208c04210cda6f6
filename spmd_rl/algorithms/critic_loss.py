"""The loss of a critic's update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from spmd_rl.algorithms.aggregate import aggregate, counts
from spmd_rl.algorithms.losses import value_loss
from spmd_rl.algorithms.masks import refuse_nonfinite
from spmd_rl.algorithms.ragged import zero_where_masked

if TYPE_CHECKING:
    from spmd_rl.engines.protocol import ValueTerms
    from spmd_rl.observe.metrics import Metrics


@dataclass(frozen=True)
class CriticLoss:
    """(value - return)^2 / 2, a mean over all counted tokens of the optimizer step; see `losses.value_loss`.

    clip: how far a value counts as moved from the one before the round (column `value`); 0: any distance.
    The batch must hold the columns `value` and `return`, float [R] each. Metric: `value/clip_fraction`, with a clip.
    Raises FloatingPointError, naming the samples, where a value or return that counts is not finite.
    """

    clip: float

    def __call__(self, terms: ValueTerms, metrics: Metrics) -> Tensor:
        mask_R, cu_seqlens = terms.mask_R, terms.cu_seqlens
        old_R, return_R = (terms.batch[name].values.to(mask_R.device) for name in ("value", "return"))
        columns = {"value": terms.value_R, "return": return_R}
        refuse_nonfinite(columns, mask_R, cu_seqlens, terms.batch.ids)
        # Masked tokens are set to 0 *before* any arithmetic: a NaN there would come back through the gradient.
        value_R, old_R, return_R = (zero_where_masked(x_R, mask_R) for x_R in (terms.value_R, old_R, return_R))
        loss_R, clipped_R = value_loss(value_R, old_R, return_R, self.clip)
        if self.clip:
            tokens = counts(mask_R, cu_seqlens)["tokens"]
            metrics.mean("value/clip_fraction", (clipped_R & (mask_R != 0)).sum(), tokens)
        return aggregate(loss_R, mask_R, cu_seqlens, "token_mean", terms.normalizers)

    def rescale(self, tokens: float, sequences: float) -> float:
        """What turns a loss normalised by counts of 1 into that of a step with these counts."""
        return 1.0 / tokens
