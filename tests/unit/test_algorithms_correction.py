"""Rollout / trainer mismatch and masks: values by hand, exact enumeration, N8 and N12."""

from __future__ import annotations

from math import log

import pytest
import torch

from spmd_rl.algorithms import masks
from spmd_rl.algorithms.correction import bound, importance_weights, report_cut, report_mismatch
from spmd_rl.data.batch import Finish
from spmd_rl.observe.metrics import Metrics
from tests.algorithm_cases import expectation, gradient

F64 = torch.float64
NAN = float("nan")
# Two responses: weights 2, 8 and (masked) anything; 1/2.
ROLLOUT_R = torch.tensor([-3.0, -3.0, -3.0, -1.0], dtype=F64)
TRAINER_R = ROLLOUT_R + torch.tensor([2.0, 8.0, 100.0, 0.5], dtype=F64).log()
MASK_R, CU = torch.tensor([1.0, 1.0, 0.0, 1.0]), torch.tensor([0, 3, 4])


@pytest.mark.parametrize(
    ("level", "right"),
    [("token", [2.0, 8.0, 1.0, 0.5]), ("sequence", [16.0] * 3 + [0.5]), ("geometric", [4.0] * 3 + [0.5])],
)
def test_weights_by_hand(level: str, right: list[float]) -> None:
    weight_R = importance_weights(TRAINER_R, ROLLOUT_R, MASK_R, CU, level)
    torch.testing.assert_close(weight_R, torch.tensor(right, dtype=F64))
    assert not weight_R.requires_grad


def test_bounds_by_hand() -> None:
    weight_R = torch.tensor([0.4, 0.5, 1.0, 2.0, 2.1])
    assert bound(weight_R, "tis", 2.0).tolist() == pytest.approx([0.4, 0.5, 1.0, 2.0, 2.0])
    assert bound(weight_R, "mis", 2.0).tolist() == pytest.approx([0.4, 0.5, 1.0, 2.0, 0.0])
    assert bound(weight_R, "icepop", 2.0, 0.5).tolist() == pytest.approx([0.0, 0.5, 1.0, 2.0, 0.0])
    with pytest.raises(ValueError, match="there are none, tis, mis, icepop"):
        bound(weight_R, "tsi", 2.0)
    with pytest.raises(ValueError, match="there are token, sequence, geometric"):
        importance_weights(TRAINER_R, ROLLOUT_R, MASK_R, CU, "group")


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weighted_policy_gradient_is_right_by_exact_enumeration(level: str) -> None:
    """Responses of two tokens, drawn by an engine that disagrees: the product weight makes the gradient exact, the
    token weight does so for an advantage that each token has by itself."""
    logits = torch.tensor([0.3, -0.5, 0.9], dtype=F64, requires_grad=True)
    rollout_A = torch.tensor([0.5, 0.2, 0.3], dtype=F64)
    reward_A = torch.tensor([0.7, -1.1, 0.2], dtype=F64)
    logprobs_A, cu = logits.log_softmax(0), torch.tensor([0, 2])

    def loss(actions: tuple[int, ...]) -> torch.Tensor:
        index = list(actions)
        weight_R = importance_weights(logprobs_A[index], rollout_A.log()[index], torch.ones(2), cu, level)
        advantage_R = reward_A[index] if level == "token" else reward_A[index].prod().expand(2)
        return (-weight_R * advantage_R * logprobs_A[index]).sum()

    probs_A = logits.softmax(0)
    value = 2 * (probs_A * reward_A).sum() if level == "token" else (probs_A * reward_A).sum() ** 2
    torch.testing.assert_close(gradient(expectation(rollout_A, 2, loss), logits), -gradient(value, logits))


def test_mismatch_by_hand_and_over_micro_batches() -> None:
    def reduced(*parts: slice) -> dict[str, float]:
        metrics = Metrics()
        for part in parts:
            report_mismatch(metrics, TRAINER_R[part], ROLLOUT_R[part], MASK_R[part])
        return metrics.reduce()

    whole = reduced(slice(0, 4))
    # log ratios ln 2, ln 8, -ln 2 of the three tokens that count.
    assert whole["mismatch/kl_k1"] == pytest.approx(-log(8) / 3)
    assert whole["mismatch/kl"] == pytest.approx((2 - 1 - log(2) + 8 - 1 - log(8) + 0.5 - 1 + log(2)) / 3)
    assert whole["mismatch/logprob_difference"] == pytest.approx((log(2) + log(8) + log(2)) / 3)
    assert whole["mismatch/ratio_mean"] == pytest.approx(10.5 / 3)
    assert whole["mismatch/ratio_max"] == pytest.approx(8)
    assert reduced(slice(0, 1), slice(1, 1), slice(1, 4)) == pytest.approx(whole)


def test_what_top_p_leaves_is_reported_instead_of_a_mismatch() -> None:
    """Probabilities 0.5, 0.3, 0.2; top-p 0.6 keeps the first two, drawn with 0.625 and 0.375: 0.8 of the mass."""
    trainer_R = torch.tensor([0.5, 0.3, 0.5, 0.2]).log()
    rollout_R = torch.tensor([0.625, 0.375, 0.625, 0.001]).log()  # the last one is masked
    metrics = Metrics()
    for part in (slice(0, 1), slice(1, 4)):
        report_cut(metrics, trainer_R[part], rollout_R[part], torch.tensor([1.0, 1, 1, 0])[part])
    assert metrics.reduce() == {"mismatch/kept_mass": pytest.approx(0.8)}


def test_loss_mask_by_hand() -> None:
    lengths_S = torch.tensor([2, 1, 0, 2, 1])
    reward_S = torch.tensor([1.0, NAN, 0.0, 0.0, 0.0])
    finish_S = torch.tensor([Finish.STOP, Finish.STOP, Finish.STOP, Finish.LENGTH, Finish.ABORTED], dtype=torch.uint8)
    assert masks.loss_mask(lengths_S, reward_S, finish_S, mask_truncated=False).tolist() == [1, 1, 0, 1, 1, 0]
    assert masks.loss_mask(lengths_S, reward_S, finish_S, mask_truncated=True).tolist() == [1, 1, 0, 0, 0, 0]


def test_n8_the_end_token_counts_and_nothing_after_it() -> None:
    end, other_end = 2, 9  # 2 is the padding token, too
    response_R = torch.tensor([5, 6, 2, 2, 2, 7, 8, 9, 2, 4, 2], dtype=torch.int32)
    lengths_S = torch.tensor([5, 1, 0, 4, 1])
    assert masks.until_end(response_R, lengths_S, [end, other_end]).tolist() == [1, 1, 1, 0, 0, 1, 1, 1, 0, 0, 1]
    assert masks.until_end(response_R, lengths_S, []).tolist() == [1] * 11


@pytest.mark.parametrize("bad", [NAN, float("-inf")])
def test_n12_a_bad_logprob_is_found_named_and_excluded(bad: float) -> None:
    values_R, cu = torch.tensor([-1.0, -2.0, bad, -1.0, bad]), torch.tensor([0, 1, 3, 3, 4, 5])
    bad_S = masks.nonfinite_samples(values_R, cu)
    assert bad_S.tolist() == [False, True, False, False, True]
    assert masks.nonfinite_samples(values_R, cu, torch.tensor([1, 1, 1, 1, 0])).tolist() == [False, True] + [False] * 3
    ids = torch.tensor([[0, 7, i] for i in range(5)])
    assert masks.name_samples(ids, bad_S) == "(epoch 0, prompt 7, sample 1), (epoch 0, prompt 7, sample 4)"
    assert masks.name_samples(ids, bad_S, most=1) == "(epoch 0, prompt 7, sample 1) and 1 more"
    reward_S = masks.exclude(torch.ones(5), bad_S)
    assert reward_S.isnan().tolist() == bad_S.tolist()
    assert masks.loss_mask(cu.diff(), reward_S, torch.zeros(5), False).tolist() == [1, 0, 0, 1, 0]


def test_spread() -> None:
    spread_R = masks.spread(torch.tensor([1.5, 2.0, -1.0]), torch.tensor([2, 0, 1]))
    assert spread_R.tolist() == [1.5, 1.5, -1.0]
