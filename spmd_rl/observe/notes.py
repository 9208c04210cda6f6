"""Says once, in a line, why a number that looks alarming is right, or which setting a bad one points to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite

Values = Mapping[str, float]


def _zero_loss(m: Values) -> bool:
    moving = m.get("reward/zero_variance_fraction", 0.0) < 1.0 and m.get("grad_norm", 1.0) > 0.0
    return abs(m.get("loss/policy", 1.0)) < 1e-3 and moving


_NOTES: dict[str, tuple[Callable[[Values], bool], str]] = {
    "zero loss": (
        _zero_loss,
        "loss/policy near 0 is right here: while the policy is the one that drew the samples every ratio is 1, and "
        "the advantages of a group add up to 0. The gradient is not 0 (grad_norm); watch reward/mean.",
    ),
    "mismatch": (
        lambda m: 0.0 < abs(m.get("mismatch/kl", 0.0)) <= 0.1,
        "mismatch/kl is small and not 0: rollout engine and trainer compute the same weights with other kernels and "
        "rounding. It should stay of this size.",
    ),
    "large mismatch": (
        lambda m: m.get("mismatch/kl", 0.0) > 0.1,
        "mismatch/kl is above 0.1: rollout engine and trainer disagree on the samples. algorithm.correction=tis "
        "corrects for it; rollout.dtype=float32 makes it smaller.",
    ),
    "no signal": (
        lambda m: m.get("reward/zero_variance_fraction", 0.0) >= 1.0,
        "reward/zero_variance_fraction is 1: within every group all rewards are equal, so all advantages are 0 and "
        "this step teaches nothing. If it stays so, the task is too hard, too easy, or the reward is constant.",
    ),
    "zero lr": (
        lambda m: m.get("lr", 1.0) == 0.0,
        "lr is 0: the warm-up starts there.",
    ),
    "truncated": (
        lambda m: m.get("response/truncated_fraction", 0.0) > 0.5,
        "more than half of the responses reached rollout.max_tokens and were cut off before their answer may have "
        "come; a larger limit may help.",
    ),
    "not finite": (
        lambda m: any(not isfinite(v) for name, v in m.items() if name.startswith(("loss/", "grad_norm"))),
        "loss or grad_norm is not finite: the weights of this step on can't be trusted.",
    ),
}


class Notes:
    """Remembers what has been said."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def about(self, metrics: Values) -> list[str]:
        """The notes that these metrics call for and that were not given before."""
        new = [name for name, (applies, _) in _NOTES.items() if name not in self._said and applies(metrics)]
        self._said.update(new)
        return [_NOTES[name][1] for name in new]
