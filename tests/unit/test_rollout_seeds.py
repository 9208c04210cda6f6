"""Seeds and random numbers are functions of a sample's identity, and of nothing else."""

from __future__ import annotations

import statistics

from spmd_rl.engines.rollout.seeds import sample_seed, uniform


def test_a_seed_is_the_same_for_ever():
    # Computed once: a change would silently draw other samples from every old configuration.
    assert sample_seed(0, "train", 0, 0, 0) == 2022215214114710512
    assert uniform(2022215214114710512, 0) == 0.5287897157930583


def test_every_part_of_the_identity_counts():
    base = (3, "train", 1, 2, 4)
    others = [(4, "train", 1, 2, 4), (3, "eval", 1, 2, 4), (3, "train", 2, 2, 4), (3, "train", 1, 3, 4)]
    others += [(3, "train", 1, 2, 5), (3, "train", 12, 4, 0), (31, "train", 2, 4, 0), (3, "train", 1, 24, 0)]
    assert len({sample_seed(*identity) for identity in [base, *others]}) == len(others) + 1


def test_seeds_have_63_bits_and_do_not_collide():
    seeds = [sample_seed(0, "train", 0, prompt, sample) for prompt in range(500) for sample in range(8)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62  # the high bit is in use


def test_uniforms_are_uniform_and_in_range():
    numbers = [uniform(seed, position) for seed in range(50) for position in range(200)]
    assert all(0.0 <= number < 1.0 for number in numbers)
    assert abs(statistics.mean(numbers) - 0.5) < 0.01  # standard error 0.003
    assert abs(statistics.pvariance(numbers) - 1 / 12) < 0.004
    deciles = [sum(int(number * 10) == d for number in numbers) for d in range(10)]
    assert all(abs(count - 1000) < 150 for count in deciles)  # 5 standard deviations
