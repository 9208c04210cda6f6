from __future__ import annotations

import json
import threading

import pytest

from spmd_rl.config.schema import RewardConfig, RewardFunctionConfig, SourceConfig
from spmd_rl.data.sources import Source, row_bytes
from spmd_rl.data.tables import HASH_DEPENDENT
from spmd_rl.engines.reward.builtin import exact_match, math_verify, near_number, reasoning_gym
from spmd_rl.engines.reward.pool import RewardPool

RIGHT: list[tuple[object, str]] = [
    ("42", "The answer is 42."),
    ("42", "I tried 41, but it is $\\boxed{42}$"),
    (42, "42"),
    ("1/2", "0.5"),
    ("\\frac{1}{2}", "\\boxed{1/2}"),
    ("$\\frac{1}{2}$", "so $0.5$"),
    ("\\boxed{\\frac{1}{2}}", "\\boxed{0.5}"),
    ("x^2+1", "$1+x^2$"),
    ("(1,2)", "$(1, 2)$"),
    ("\\{1,2\\}", "$\\{2,1\\}$"),
    ("x+y=3", "$y = 3-x$"),
    ("1,000", "1000"),
    ("She has 3 + 4 = 7 apples.\n#### 7", "7"),
]
WRONG: list[tuple[object, str]] = [
    ("42", "41"),
    ("42", ""),
    ("42", "I do not know"),
    ("1/2", "$\\frac{1}{3}$"),
    ("x^2+1", "$x^2$"),
    ("7", "漢字 😀"),
]


def judge(pool, gold_and_response):
    rows = [{"answer": gold} for gold, _ in gold_and_response]
    ids = [(0, i, 0) for i in range(len(rows))]
    return pool.score(["?"] * len(rows), [r for _, r in gold_and_response], rows, ids).result(100)


@pytest.mark.parametrize(("gold", "response"), RIGHT)
def test_math_verify_right(gold, response):
    assert math_verify("?", response, {"answer": gold}) == 1.0


@pytest.mark.parametrize(("gold", "response"), WRONG)
def test_math_verify_wrong(gold, response):
    assert math_verify("?", response, {"answer": gold}) == 0.0


def test_math_verify_in_threads():
    """D6: its alarm only works in main threads; elsewhere every answer would be wrong without a word."""
    scores: dict[int, float] = {}

    def work(i, gold, response):
        scores[i] = math_verify("?", response, {"answer": gold})

    threads = [threading.Thread(target=work, args=(i, *pair)) for i, pair in enumerate(RIGHT + WRONG)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [scores[i] for i in range(len(threads))] == [1.0] * len(RIGHT) + [0.0] * len(WRONG)


def test_math_verify_in_workers_and_an_endless_comparison():
    """D6 in worker processes; a response that can't be evaluated in the time given is wrong, and only that one."""
    pool = RewardPool(RewardConfig([RewardFunctionConfig(function="math_verify")], workers=2, timeout_s=4.0))
    try:
        endless: list[tuple[object, str]] = [("42", "10**10**10")]
        scores = judge(pool, RIGHT + endless + WRONG)
    finally:
        pool.close()
    assert scores.reward == [1.0] * len(RIGHT) + [0.0] * (1 + len(WRONG))
    assert scores.late == 1 and scores.errors == {}


def test_math_verify_refuses_answers_that_are_none():
    with pytest.raises(ValueError, match="finds no expression in the answer ''"):
        math_verify("?", "42", {"answer": " "})
    with pytest.raises(ValueError, match="the row has no answer"):
        math_verify("?", "42", {})


def test_tag_and_exact_match():
    row = {"answer": " 漢字 "}
    assert exact_match("?", "漢字\n", row) == 1.0 and exact_match("?", "漢", row) == 0.0
    assert exact_match("?", "<answer>no</answer> then <answer>\n漢字 </answer>!", row, tag="answer") == 1.0
    assert exact_match("?", "漢字", row, tag="answer") == 0.0
    assert exact_match("?", "3", {"answer": 3}) == 1.0
    assert math_verify("?", "<a>41</a> 42", {"answer": "42"}, tag="a") == 0.0


def rows_of(task, **params):
    config = SourceConfig(name="g", generator=task, params=params, size=4, seed=1)
    source = Source.open(config, "data.train[0]")
    return [json.loads(row_bytes(source.row(i), "")) for i in range(2)]


def test_reasoning_gym_scores_with_the_task_s_own_scorer():
    row = rows_of("chain_sum", max_terms=3)[0]
    answer = row["answer"]
    assert reasoning_gym("?", answer, row) == 1.0
    near = reasoning_gym("?", f"It is {answer}", row)
    assert 0 < near < 1
    assert reasoning_gym("?", f"It is {answer}", row, strict=True) == 0.0
    assert reasoning_gym("?", f"It is <answer>{answer}</answer>", row, strict=True, tag="answer") == 1.0
    assert reasoning_gym("?", "nothing", row, strict=True) == 0.0
    with pytest.raises(ValueError, match="does not come from a reasoning-gym generator"):
        reasoning_gym("?", "1", {"answer": "1"})


def test_every_task_survives_the_way_through_json():
    """The right answer of each task's row has the full score after the row has been JSON."""
    from reasoning_gym.factory import DATASETS

    needs_more = {"composite"}  # has no tasks of its own
    slow = {"knight_swap", "futoshiki", "zebra_puzzles", "puzzle24", "polynomial_equations", "sudoku"}
    scored = 0
    for task in sorted(set(DATASETS) - needs_more - slow - HASH_DEPENDENT):
        row = rows_of(task)[1]
        if row["answer"] is not None:  # else any answer that solves the task is right
            assert reasoning_gym("?", row["answer"], row) == 1.0, task
            scored += 1
        for garbage in ("", "9**9", "[[1,2],[3]]", '{"a": 1}', "1e400", "漢"):
            assert 0.0 <= reasoning_gym("?", garbage, row) <= 1.0, task
    assert scored > 85


def test_a_scorer_that_fails_on_the_right_answer_is_not_silenced():
    row = rows_of("n_queens")[0]
    with pytest.raises(KeyError):
        reasoning_gym("?", "2 x 3", {**row, "metadata": {}})


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("-4", 1.0),
        (" -4\n", 1.0),
        ("-4.0", 1.0),
        ("-3", 0.5 / 1.2),
        ("1", 0.25),
        ("-9", 0.25),
        ("it is -4", 0.0),
        ("", 0.0),
    ],
)
def test_near_number_falls_with_the_error_and_only_the_answer_is_1(response, value):
    assert near_number("", response, {"answer": "-4"}) == pytest.approx(value)
    assert near_number("", response, {"answer": "-4"}, scale=1e-9) == pytest.approx(float(value == 1), abs=1e-8)
    with pytest.raises(ValueError, match="four"):
        near_number("", response, {"answer": "four"})
