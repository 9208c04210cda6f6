"""The configured loss as the train engine calls it: N1, N3, N6 (ratio), N12, and independence of the micro-batches."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import exp

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_rl.algorithms.aggregate import AGGREGATIONS, local_counts
from spmd_rl.algorithms.policy_loss import LOSSES, policy_loss
from spmd_rl.config.schema import AlgorithmConfig
from spmd_rl.data.batch import Batch
from spmd_rl.observe.metrics import Metrics
from tests.algorithm_cases import make_batch, make_terms

BASE = AlgorithmConfig()
N1_RIGHT = {"token_mean": 0.5, "seq_mean_token_sum": 1.0, "seq_mean_token_mean": 0.0, "constant": 0.25}


def run(
    algorithm: AlgorithmConfig,
    batch: Batch,
    logprob_R: torch.Tensor,
    mask_R: torch.Tensor | None = None,
    cuts: tuple[int, ...] = (),
    entropy_R: torch.Tensor | None = None,
    updates_per_step: int = 1,
) -> tuple[float, torch.Tensor, dict[str, float]]:
    """(loss, gradient, metrics) with the batch divided at the samples `cuts` into micro-batches of two "ranks"."""
    loss_function = policy_loss(algorithm, updates_per_step=updates_per_step, max_tokens=4)
    logprob_R = logprob_R.clone().requires_grad_()
    cu = next(iter(batch.columns.values())).offsets
    mask_R = torch.ones(len(logprob_R)) if mask_R is None else mask_R
    entropy_R = torch.zeros(len(logprob_R)) if entropy_R is None else entropy_R
    normalizers, ranks, total = local_counts(mask_R, cu), [Metrics(), Metrics()], 0.0
    for number, (first, last) in enumerate(pairwise([0, *cuts, len(batch)])):
        tokens = slice(int(cu[first]), int(cu[last]))
        part = batch.select(torch.arange(first, last))
        terms = make_terms(part, logprob_R[tokens], mask_R[tokens], normalizers, entropy_R[tokens])
        share = loss_function(terms, ranks[number % 2])
        if share.requires_grad:
            share.backward()
        total += float(share.detach())
    ranks[0].merge(ranks[1])
    grad = logprob_R.grad if logprob_R.grad is not None else torch.zeros_like(logprob_R)
    return total, grad, ranks[0].reduce()


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("cuts", [(), (1,), (0, 1, 1, 2)])
def test_n1(mode: str, cuts: tuple[int, ...]) -> None:
    batch = make_batch([1, 3], {"advantage": torch.tensor([1.0, -1.0, -1.0, -1.0])})
    loss, grad, metrics = run(replace(BASE, aggregation=mode), batch, torch.full((4,), -1.5), cuts=cuts)
    assert loss == pytest.approx(N1_RIGHT[mode], abs=1e-7)
    weights = {"token_mean": [4] * 4, "seq_mean_token_mean": [2, 6, 6, 6], "seq_mean_token_sum": [2] * 4}
    weight_R = torch.tensor(weights.get(mode, [8] * 4), dtype=torch.float32)
    torch.testing.assert_close(grad, torch.tensor([-1.0, 1.0, 1.0, 1.0]) / weight_R)
    assert metrics["loss/policy"] == pytest.approx(N1_RIGHT[mode], abs=1e-7)


def test_n3_clip_fraction_of_all_tokens() -> None:
    # Two samples of 12 and 4 tokens with 3 clipped tokens each, in micro-batches of their own: 6 of 16.
    log_ratio_R = torch.zeros(16)
    log_ratio_R[[0, 5, 11, 12, 13, 15]] = 0.7
    batch = make_batch([12, 4], {"advantage": torch.ones(16), "old_logprob": torch.full((16,), -2.0)})
    metrics = run(BASE, batch, log_ratio_R - 2.0, cuts=(1,))[2]
    assert metrics["ratio/clip_fraction"] == pytest.approx(0.375)
    assert metrics["ratio/max"] == pytest.approx(torch.tensor(0.7).exp().item(), rel=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_n6_on_policy_the_ratio_is_exactly_1(loss: str) -> None:
    torch.manual_seed(0)
    advantage_R, logprob_R = torch.randn(9), -3 * torch.rand(9)
    batch = make_batch([4, 5], {"advantage": advantage_R.repeat_interleave(1), "rollout_logprob": logprob_R + 0.05})
    algorithm = replace(BASE, loss=loss)
    _, grad, metrics = run(algorithm, batch, logprob_R)
    assert (metrics["ratio/mean"], metrics["ratio/max"], metrics["ratio/clip_fraction"]) == (1.0, 1.0, 0.0)
    if loss != "gmpo":  # it takes the mean advantage of the response
        weight = exp(-0.05) if loss == "decoupled_ppo" else 1.0
        torch.testing.assert_close(grad, -weight * advantage_R / 9)
    # The deviation from the engine that drew the tokens is reported, and never takes the place of the ratio.
    assert metrics["mismatch/logprob_difference"] == pytest.approx(0.05, rel=1e-3)
    with pytest.raises(ValueError, match="several updates per step need the column 'old_logprob'"):
        run(algorithm, batch, logprob_R, updates_per_step=2)


CORRECTIONS = [("none", "token"), ("tis", "token"), ("mis", "sequence"), ("icepop", "geometric")]


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=6),
    st.sampled_from(LOSSES),
    st.sampled_from(AGGREGATIONS),
    st.sampled_from(CORRECTIONS),
    st.sampled_from(["k2", "k3", "k3_ratio"]),
    st.integers(0, 2**31),
    st.data(),
)
@settings(deadline=None, max_examples=80)
def test_any_split_gives_the_same_loss_gradient_and_metrics(
    lengths: list[int],
    loss: str,
    mode: str,
    correction: tuple[str, str],
    estimator: str,
    seed: int,
    data: st.DataObject,
) -> None:
    torch.manual_seed(seed)
    total = sum(lengths)
    names = ("old_logprob", "ref_logprob", "rollout_logprob")
    logprob_R = torch.randn(total, dtype=torch.float64) - 2
    columns = {name: (logprob_R + 0.4 * torch.randn(total)).float() for name in names}
    batch = make_batch(lengths, {**columns, "advantage": torch.randn(total)})
    algorithm = AlgorithmConfig(
        loss=loss, aggregation=mode, correction=correction[0], correction_level=correction[1], correction_floor=0.5,
        kl_coef=0.1, kl_estimator=estimator, entropy_coef=0.01, drift_coef=0.1 if loss == "cpgd" else 0.0,
    )  # fmt: skip
    mask_R, entropy_R = torch.randint(0, 2, (total,)).float(), torch.rand(total)
    cuts = tuple(sorted(data.draw(st.lists(st.integers(0, len(lengths)), max_size=4))))
    whole_loss, whole_grad, whole_metrics = run(algorithm, batch, logprob_R, mask_R, (), entropy_R, 2)
    split_loss, split_grad, split_metrics = run(algorithm, batch, logprob_R, mask_R, cuts, entropy_R, 2)
    assert split_loss == pytest.approx(whole_loss, rel=1e-6, abs=1e-6)
    torch.testing.assert_close(split_grad, whole_grad, rtol=1e-6, atol=1e-7)
    assert split_metrics == pytest.approx(whole_metrics, rel=1e-5, abs=1e-6)
    if bool(mask_R.any()):
        parts = whole_metrics["loss/policy"] + whole_metrics["loss/kl"] + whole_metrics["loss/entropy"]
        assert whole_loss == pytest.approx(parts, rel=1e-5, abs=1e-6)


def test_terms_by_hand() -> None:
    # Ratio 1, advantage 2; ref a factor 2 below, rollout weight 4 cut at 3; entropies 0.5 and 1.
    ln2 = torch.tensor(2.0).log()
    logprob_R = torch.tensor([-1.0, -2.0])
    batch = make_batch(
        [2],
        {
            "advantage": torch.tensor([2.0, 2.0]),
            "ref_logprob": logprob_R - ln2,
            "rollout_logprob": logprob_R - 2 * ln2,
        },
    )
    algorithm = AlgorithmConfig(kl_coef=0.5, entropy_coef=0.1, correction="tis", correction_cap=3.0)
    loss, grad, metrics = run(algorithm, batch, logprob_R, entropy_R=torch.tensor([0.5, 1.0]))
    assert metrics["loss/policy"] == pytest.approx(-6.0)
    assert metrics["loss/kl"] == pytest.approx(0.5 * float(ln2) ** 2 / 2)
    assert metrics["loss/entropy"] == pytest.approx(-0.075)
    assert metrics["entropy"] == pytest.approx(0.75)
    assert metrics["kl/ref"] == pytest.approx(0.5 - 1 + float(ln2))
    assert metrics["correction/weight_mean"] == pytest.approx(3.0)
    assert metrics["correction/bounded_fraction"] == pytest.approx(1.0)
    assert metrics["mismatch/ratio_max"] == pytest.approx(4.0)
    assert loss == pytest.approx(-6.0 + 0.25 * float(ln2) ** 2 - 0.075)
    torch.testing.assert_close(grad, (-6.0 + 0.5 * ln2).expand(2) / 2)


def test_decoupled_ppo_bounds_around_the_old_policy_and_weighs_by_the_one_that_drew() -> None:
    """Ratios 1.5 (clipped), 1.1; old / rollout 2 and 8 (cut at 3): -(2 * 1.2 + 3 * 1.1) / 2, as ppo_clip with tis."""
    old_R = torch.tensor([-1.0, -2.0])
    columns = {
        "advantage": torch.ones(2),
        "old_logprob": old_R,
        "rollout_logprob": old_R - torch.tensor([2.0, 8]).log(),
    }
    batch, logprob_R = make_batch([2], columns), old_R + torch.tensor([1.5, 1.1]).log()
    found = run(AlgorithmConfig(loss="decoupled_ppo", correction_cap=3.0), batch, logprob_R, updates_per_step=2)
    assert found[0] == pytest.approx(-(2 * 1.2 + 3 * 1.1) / 2)
    assert found[2]["correction/weight_mean"] == pytest.approx(2.5)
    assert found[2]["correction/bounded_fraction"] == pytest.approx(0.5)
    same = run(AlgorithmConfig(correction="tis", correction_cap=3.0), batch, logprob_R, updates_per_step=2)
    assert found[0] == pytest.approx(same[0]) and found[1].tolist() == pytest.approx(same[1].tolist())


def test_a_cut_distribution_is_reported_as_such() -> None:
    batch = make_batch([2], {"advantage": torch.ones(2), "rollout_logprob": torch.tensor([0.5, 0.25]).log()})
    terms, metrics = make_terms(batch, torch.tensor([0.4, 0.2]).log()), Metrics()
    policy_loss(BASE, updates_per_step=1, max_tokens=4, cut=True)(terms, metrics)
    mismatch = {name: value for name, value in metrics.reduce().items() if name.startswith("mismatch/")}
    assert mismatch == {"mismatch/kept_mass": pytest.approx(0.8)}


def test_kl_in_the_reward_is_no_term_of_the_loss() -> None:
    batch = make_batch([1], {"advantage": torch.zeros(1), "ref_logprob": torch.tensor([-2.0])})
    terms = make_terms(batch, torch.tensor([-1.0]))
    for where, right in (("loss", 0.5), ("reward", 0.0)):
        loss = policy_loss(replace(BASE, kl_coef=1.0, kl_in=where), updates_per_step=1, max_tokens=4)
        assert float(loss(terms, Metrics())) == pytest.approx(right)


@pytest.mark.parametrize("column", ["logprob", "advantage", "old_logprob", "ref_logprob", "rollout_logprob"])
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_n12_never_a_silent_nan(column: str, bad: float) -> None:
    columns = {n: torch.zeros(5) for n in ("logprob", "advantage", "old_logprob", "ref_logprob", "rollout_logprob")}
    columns[column][3] = bad
    logprob_R = columns.pop("logprob")
    batch = make_batch([2, 3], columns, groups=[4, 9])
    message = rf"^{column} is NaN or infinite in sample \(epoch 0, prompt 9, sample 1\)"
    with pytest.raises(FloatingPointError, match=message):
        run(BASE, batch, logprob_R)
    # The sample that the mask excludes may hold anything: the others train on, with finite gradients.
    for loss in LOSSES:
        value, grad, metrics = run(replace(BASE, loss=loss), batch, logprob_R, torch.tensor([1.0, 1, 0, 0, 0]))
        assert grad[2:].tolist() == [0.0, 0.0, 0.0] and bool(grad.isfinite().all())
        assert all(map(torch.isfinite, torch.tensor(list(metrics.values())))) and value == value


def test_n5_zero_advantages_have_zero_gradient() -> None:
    batch = make_batch([3, 2], {"advantage": torch.zeros(5), "rollout_logprob": -torch.rand(5)})
    for loss in LOSSES:
        value, grad, _ = run(replace(BASE, loss=loss), batch, -torch.rand(5))
        assert value == 0.0 and grad.tolist() == [0.0] * 5


def test_missing_columns_and_unknown_names() -> None:
    batch = make_batch([2], {"advantage": torch.ones(2)})
    with pytest.raises(ValueError, match="needs the column 'ref_logprob'"):
        run(replace(BASE, kl_coef=0.1), batch, torch.zeros(2))
    with pytest.raises(ValueError, match="needs the column 'rollout_logprob'"):
        run(replace(BASE, correction="tis"), batch, torch.zeros(2))
    with pytest.raises(ValueError, match="needs the column 'advantage'"):
        run(BASE, make_batch([2], {"old_logprob": torch.ones(2)}), torch.zeros(2))
    with pytest.raises(ValueError, match="there are ppo_clip, decoupled_ppo, gspo"):
        run(replace(BASE, loss="ppo"), batch, torch.zeros(2))


def test_metrics_of_the_contract_are_always_there() -> None:
    batch = make_batch([2], {"advantage": torch.ones(2), "rollout_logprob": torch.zeros(2)})
    metrics = run(BASE, batch, torch.zeros(2))[2]
    wanted = {"loss/policy", "loss/kl", "entropy", "ratio/mean", "ratio/max", "ratio/clip_fraction", "mismatch/kl"}
    assert wanted <= set(metrics)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_a_step_whose_counts_are_known_only_in_the_end_is_scaled_to_the_same_gradient(mode: str) -> None:
    """Streaming: micro-batches are normalised by 1, the sum of their gradients by `rescale`."""
    algorithm = replace(BASE, aggregation=mode, entropy_coef=0.1)
    batch = make_batch([2, 3, 1], {"advantage": torch.tensor([1.0, 1.0, -2.0, -2.0, -2.0, 0.5])})
    cu, mask_R = batch["advantage"].offsets, torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, 0.0])
    gradients = []
    for normalizers in (local_counts(mask_R, cu), {"tokens": 1.0, "sequences": 1.0}):
        logprob_R = torch.linspace(-1, -2, 6).requires_grad_()
        loss = policy_loss(algorithm, updates_per_step=1, max_tokens=4)
        loss(make_terms(batch, logprob_R, mask_R, normalizers, 2 * logprob_R), Metrics()).backward()
        assert logprob_R.grad is not None
        gradients.append(logprob_R.grad)
    assert torch.allclose(gradients[0], gradients[1] * loss.rescale(4.0, 2.0), rtol=1e-6, atol=0)
    assert gradients[0].abs().max() > 0.01
