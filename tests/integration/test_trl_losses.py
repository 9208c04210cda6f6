"""Our losses equal those of TRL's own code, in value and gradient, on random ragged batches."""

from __future__ import annotations

from perf.trl_losses import TOLERANCE, compare


def test_losses_and_gradients_equal_trl() -> None:
    rows = compare(seed=11)
    assert {row["case"] for row in rows} >= {"grpo", "dr_grpo", "dapo", "cispo", "gspo"}
    for row in rows:
        assert abs(row["trl"]) > 1e-4, row  # a loss of 0 would prove nothing
        assert row["loss_difference"] <= TOLERANCE, row
        assert row["gradient_difference"] <= TOLERANCE, row
