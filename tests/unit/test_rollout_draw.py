"""Tokens are drawn from exactly the distribution whose log-probabilities are reported."""

from __future__ import annotations

import math

import pytest
import torch

from spmd_rl.engines.protocol import Sampling
from spmd_rl.engines.rollout.draw import draw_tokens, processed_logprobs


def expected_probabilities(logits: list[float], sampling: Sampling) -> list[float]:
    """The definition, by plain loops."""
    scaled = [x / sampling.temperature for x in logits]
    order = sorted(range(len(scaled)), key=lambda i: -scaled[i])
    kept = order[: sampling.top_k] if sampling.top_k else order
    weights = {i: math.exp(scaled[i]) for i in kept}
    total, nucleus, mass = sum(weights.values()), [], 0.0
    for i in kept:
        if mass >= sampling.top_p * total and sampling.top_p < 1:
            break
        nucleus.append(i)
        mass += weights[i]
    return [weights[i] / mass if i in nucleus else 0.0 for i in range(len(logits))]


SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.6),
    Sampling(temperature=1.7, top_k=3),
    Sampling(top_p=0.5),
    Sampling(temperature=0.8, top_p=0.9, top_k=4),
    Sampling(top_p=1e-6),  # the greatest alone
    Sampling(top_k=1000),  # more than there are
]


def test_probabilities_are_those_of_the_definition_row_by_row():
    torch.manual_seed(0)
    logits_BV = torch.randn(len(SAMPLINGS), 11) * 2
    got_BV = processed_logprobs(logits_BV, SAMPLINGS).exp()
    for row, sampling in enumerate(SAMPLINGS):
        expected = expected_probabilities(logits_BV[row].tolist(), sampling)
        torch.testing.assert_close(got_BV[row].tolist(), expected, rtol=1e-5, atol=1e-7)


def test_a_row_does_not_depend_on_the_others():
    torch.manual_seed(1)
    logits_BV = torch.randn(len(SAMPLINGS), 33)
    together = processed_logprobs(logits_BV, SAMPLINGS)
    for row, sampling in enumerate(SAMPLINGS):
        assert torch.equal(processed_logprobs(logits_BV[row : row + 1], [sampling])[0], together[row])


def test_greedy_rows_report_temperature_one_and_take_the_greatest():
    logits_BV = torch.tensor([[0.0, 3.0, 1.0]])
    greedy = [Sampling(temperature=0.0, top_k=1, top_p=0.1)]
    logprobs_BV = processed_logprobs(logits_BV, greedy)
    torch.testing.assert_close(logprobs_BV, logits_BV.log_softmax(-1))
    assert draw_tokens(logprobs_BV, greedy, [0.999]).tolist() == [1]


def test_bfloat16_logits_are_normalised_in_float32():
    logits_BV = torch.randn(2, 1000, dtype=torch.bfloat16)
    logprobs_BV = processed_logprobs(logits_BV, [Sampling()] * 2)
    assert logprobs_BV.dtype == torch.float32
    torch.testing.assert_close(logprobs_BV.exp().sum(-1), torch.ones(2), rtol=1e-5, atol=0)


def test_inversion_maps_each_number_to_its_interval():
    logprobs_BV = torch.tensor([[0.1, 0.0, 0.6, 0.3, 0.0]]).log()
    cases = [(0.0, 0), (0.0999, 0), (0.1001, 2), (0.6999, 2), (0.7001, 3), (1 - 2**-53, 3)]
    for number, token in cases:
        assert draw_tokens(logprobs_BV, [Sampling()], [number]).tolist() == [token], number


def test_frequencies_are_the_probabilities():
    torch.manual_seed(2)
    sampling = Sampling(temperature=0.7, top_k=5)
    logprobs_BV = processed_logprobs(torch.randn(1, 9), [sampling])
    count = 20_000
    numbers = torch.rand(count, dtype=torch.float64).tolist()
    tokens = draw_tokens(logprobs_BV.expand(count, -1), [sampling] * count, numbers)
    frequency_V = torch.bincount(tokens, minlength=9) / count
    probability_V = logprobs_BV[0].exp()
    assert (frequency_V[probability_V == 0] == 0).all()
    deviation_V = (probability_V * (1 - probability_V) / count).sqrt()
    assert ((frequency_V - probability_V).abs() <= 5 * deviation_V).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_stays_visible_and_gives_a_valid_token(temperature: float):
    samplings = [Sampling(temperature=temperature)] * 2
    logits_BV = torch.zeros(2, 7)
    logits_BV[1] = float("nan")
    logprobs_BV = processed_logprobs(logits_BV, samplings)
    token_B = draw_tokens(logprobs_BV, samplings, [0.5, 0.5])
    assert 0 <= int(token_B[1]) < 7
    assert not logprobs_BV[0].isnan().any()
    assert bool(logprobs_BV[1, token_B[1]].isnan())
