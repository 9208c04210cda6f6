from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from spmd_rl.config.errors import UserError
from spmd_rl.config.schema import RewardConfig, RewardFunctionConfig
from spmd_rl.engines.reward.functions import FunctionSpec
from spmd_rl.engines.reward.manager import deal
from spmd_rl.engines.reward.pool import RewardPool
from spmd_rl.engines.reward.scores import labels
from tests.processes import ended

USER = "tests.unit.reward_functions"
MINE = f"{USER}:by_row"


def make(*functions, **settings):
    """Each function: a name, or (name, further fields)."""
    fields = [(f, {}) if isinstance(f, str) else f for f in functions]
    return RewardConfig([RewardFunctionConfig(function=name, **more) for name, more in fields], **settings)


def score(pool, rows, responses=None, deadline_s=60.0):
    responses = responses or ["abc"] * len(rows)
    ids = [(2, i // 4, i % 4) for i in range(len(rows))]
    return pool.score(["prompt"] * len(rows), responses, rows, ids).result(deadline_s)


@pytest.fixture
def pool():
    """A maker of pools that are closed at the end."""
    made = []

    def build(*functions, **settings):
        made.append(RewardPool(make(*functions, **settings)))
        return made[-1]

    yield build
    for each in made:
        each.close()


# --- right values


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_total_is_the_weighted_sum(pool, workers):
    weighted = pool(
        (f"{USER}:length", {"weight": 0.5, "args": {"scale": 2.0}}),
        (f"{USER}:batched", {"weight": -1.0, "batched": True}),
        (f"{USER}:parts", {"weight": 2.0}),
        (f"{USER}:judge", {"weight": 10.0}),
        workers=workers,
    )
    responses = ["x" * (i % 5) for i in range(17)]
    scores = score(weighted, [{"format": 0.5}] * 17, responses)
    assert scores.parts == [[2.0 * len(r), 6 + 10 * len(r), 1.5, len(r)] for r in responses]
    assert scores.reward == pytest.approx([len(r) - 6 - 10 * len(r) + 3 + 10 * len(r) for r in responses])
    assert scores.extras == [{"parts/format": 0.5}] * 17 and scores.errors == {} and scores.late == 0


def test_numbers_of_other_kinds(pool):
    assert score(pool(MINE), [{"do": "numpy"}, {"do": "bool"}]).reward == [0.25, 1.0]


def test_no_samples(pool):
    assert score(pool(MINE), []).reward == []


def test_many_steps_in_flight(pool):
    busy = pool(f"{USER}:length", workers=2)
    pending = [busy.score(["p"] * 9, ["x" * k] * 9, [{}] * 9, [(0, k, s) for s in range(9)]) for k in range(20)]
    assert [p.result(60).reward for p in reversed(pending)] == [[float(k)] * 9 for k in reversed(range(20))]


def test_workers_are_other_processes_without_torch(pool):
    scores = score(pool(f"{USER}:process", workers=2), [{}] * 64)
    assert os.getpid() not in scores.reward and 1 <= len(set(scores.reward)) <= 2
    assert {e["process/torch"] for e in scores.extras} == {0.0} and {e["process/main"] for e in scores.extras} == {1.0}


def test_cheap_rewards_cost_milliseconds(pool):
    cheap = pool("exact_match", workers=1)
    score(cheap, [{"answer": "abc"}] * 64)
    times = []
    for _ in range(10):
        begin = time.perf_counter()
        assert score(cheap, [{"answer": "abc"}] * 64).reward == [1.0] * 64
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.1, times  # about 5 ms on an idle machine


def test_ordinary_calls_share_the_workers_and_async_ones_run_together(pool):
    begin = time.perf_counter()
    judged = pool(f"{USER}:judge", workers=1)
    judged.check()
    begin = time.perf_counter()
    assert score(judged, [{}] * 40).reward == [3.0] * 40  # each waits 0.2 s
    assert time.perf_counter() - begin < 4


# --- what goes wrong, named by sample and function


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("raise", "raised ZeroDivisionError: division by zero (tests/unit/reward_functions.py:"),
        ("none", "returned None; a number is wanted"),
        ("nan", "returned nan; a number is wanted"),
        ("text", "returned '0.5'; a number is wanted"),
        ("huge", "returned 1e+308; a number is wanted, at most 1e+12 in size"),
        ("exit", "raised SystemExit: 3"),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_errors_name_sample_and_function(pool, what, message, workers):
    rows: list[dict] = [{}] * 5 + [{"do": what}] + [{}] * 3
    with pytest.raises(UserError) as caught:
        score(pool(MINE, workers=workers), rows)
    assert str(caught.value).startswith(f"reward function {MINE!r}, sample (epoch 2, prompt 1, sample 1): {message}")
    assert "\n" not in str(caught.value)

    scores = score(pool(MINE, (f"{USER}:length", {"weight": 0.0}), workers=workers, on_error="exclude"), rows)
    assert [math.isnan(r) for r in scores.reward] == [i == 5 for i in range(9)]
    assert scores.reward[:5] == [1.0] * 5 and list(scores.errors) == [5] and message in scores.errors[5]
    assert math.isnan(scores.parts[5][0]) and scores.parts[5][1] == 3.0


@pytest.mark.parametrize(
    ("what", "message", "late"),
    [
        ("hang", "took longer than reward.timeout_s=0.5", 1),
        ("spin", "took longer than reward.timeout_s=0.5", 1),
        ("die", "ended its process (signal 9)", 0),
    ],
)
def test_only_the_guilty_sample_is_lost(pool, what, message, late):
    strict = pool(MINE, workers=2, timeout_s=0.5, on_error="exclude")
    rows: list[dict] = [{}] * 40
    rows[17] = {"do": what}
    scores = score(strict, rows)
    assert list(scores.errors) == [17] and message in scores.errors[17] and scores.late == late
    assert [r for i, r in enumerate(scores.reward) if i != 17] == [1.0] * 39
    assert score(strict, [{}] * 8).reward == [1.0] * 8  # a new worker has taken over


def test_the_limit_is_for_one_call_not_for_the_step(pool):
    # Three calls go to the worker together.
    scores = score(pool(f"{USER}:slow", workers=1, timeout_s=0.8), [{"seconds": 0.3}] * 12)
    assert scores.reward == [1.0] * 12 and scores.late == 0


@pytest.mark.parametrize("what", ["hang", "block", "raise"])
def test_async_calls(pool, what):
    judged = pool(f"{USER}:judge", workers=1, timeout_s=0.6, on_error="exclude")
    rows: list[dict] = [{}] * 6
    rows[2] = {"do": what}
    scores = score(judged, rows)
    message = "raised ConnectionError: judge is away" if what == "raise" else "took longer than reward.timeout_s=0.6"
    assert list(scores.errors) == [2] and message in scores.errors[2]
    assert scores.late == (what != "raise") and [r for i, r in enumerate(scores.reward) if i != 2] == [3.0] * 5


def test_a_function_may_say_what_a_time_out_is_worth(pool):
    scores = score(pool(f"{USER}:worth_half", workers=1, timeout_s=0.3), [{}] * 2)
    assert scores.reward == [0.5, 0.5] and scores.errors == {} and scores.late == 2


@pytest.mark.parametrize("workers", [0, 1])
def test_wrong_counts_from_batched_functions(pool, workers):
    for name, args, message in (
        ("batched", {"drop": 1}, "returned 3 rewards for 4 samples"),
        ("batched_number", {}, "returned 1.0; a list of 4 rewards is wanted"),
    ):
        spec = (f"{USER}:{name}", {"batched": True, "args": args})
        with pytest.raises(UserError, match=r"sample \(epoch 2, prompt 0, sample 0\): " + message):
            score(pool(spec, workers=workers), [{}] * 4)
        assert len(score(pool(spec, workers=workers, on_error="exclude"), [{}] * 4).errors) == 4


def test_a_dict_needs_its_reward(pool):
    with pytest.raises(UserError, match="returned a dict without 'reward'"):
        score(pool(f"{USER}:no_reward"), [{}])
    with pytest.raises(UserError, match="returned 'format': 'bad'; a number is wanted"):
        score(pool(f"{USER}:parts"), [{"format": "bad"}])


def test_a_module_that_hangs_while_it_is_imported_is_named(pool, tmp_path):
    (tmp_path / "sleepy.py").write_text("import time\n\ntime.sleep(3600)\n")
    name = f"{tmp_path}/sleepy.py:never"
    with pytest.raises(UserError) as caught:
        pool(name, load_timeout_s=0.5).check()
    assert repr(name) in str(caught.value) and "reward.load_timeout_s=0.5" in str(caught.value)


def test_a_deadline_names_a_missing_sample(pool):
    pending = pool(MINE, workers=1).score(["p"] * 2, ["r"] * 2, [{}, {"do": "hang"}], [(0, 7, 0), (0, 7, 1)])
    with pytest.raises(TimeoutError, match=r"the first is sample \(epoch 0, prompt 7, sample [01]\)"):
        pending.result(0.1)


def test_unequal_lists_are_refused(pool):
    with pytest.raises(ValueError, match="1 prompts, 2 responses, 1 rows, 1 ids"):
        pool(MINE).score(["p"], ["a", "b"], [{}], [(0, 0, 0)])


# --- functions that can't be loaded


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        (f"{USER}:lenght", {}, "has no 'lenght'; did you mean 'length'?"),
        (f"{USER}:NOT_A_FUNCTION", {}, "is int, not a function"),
        ("no_such_module:f", {}, "no module 'no_such_module', neither installed nor in"),
        (
            "math_verfy",
            {},
            "neither a built-in (exact_match, near_number, math_verify, reasoning_gym) nor module:function; did you",
        ),
        ("no/such.py:f", {}, "no file "),
        (f"{USER}:length", {"args": {"scael": 1}}, "got an unexpected keyword argument 'scael'"),
        ("os.path:join", {}, ""),
    ],
)
def test_bad_names_are_refused_at_the_start(pool, workers, name, more, message):
    if name == "os.path:join":  # any callable that takes three arguments is accepted
        pool(name, workers=workers).check()
        return
    with pytest.raises(UserError) as caught:
        pool((name, more), workers=workers).check()
    assert f"reward function {name!r}" in str(caught.value) and message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_scoring_after_a_refusal_fails_with_its_message(pool):
    broken = pool("no_such_module:f", workers=1)
    for _ in range(2):
        with pytest.raises(UserError, match="no module 'no_such_module'"):
            score(broken, [{}])


def test_files_and_modules_beside_the_user(tmp_path, monkeypatch):
    (tmp_path / "helper.py").write_text("VALUE = 4.5\n")
    (tmp_path / "mine.py").write_text("from helper import VALUE\ndef f(prompt, response, row):\n    return VALUE\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mine.py").write_text("def f(prompt, response, row):\n    return 2\n")
    (tmp_path / "broken.py").write_text("import json\nimport no_such_thing\n")
    (tmp_path / "leaves.py").write_text("raise SystemExit('not for import')\n")
    # A folder of the user's must not hide a library of the same name.
    (tmp_path / "reasoning_gym").mkdir()
    (tmp_path / "reasoning_gym" / "__init__.py").write_text("raise ImportError('hidden')\n")
    script = """
import sys
from spmd_rl.config.schema import RewardConfig, RewardFunctionConfig
from spmd_rl.engines.reward.pool import RewardPool
from spmd_rl.engines.reward.scores import labels
names, workers = sys.argv[2:], int(sys.argv[1])
try:
    pool = RewardPool(RewardConfig([RewardFunctionConfig(function=n) for n in names], workers=workers))
    pool.check()
    row = {"generator": {"task": "chain_sum", "params": {}}, "metadata": {}, "answer": "4"}
    print(pool.score([""], ["4"], [row], [(0, 0, 0)]).result(60).parts)
    pool.close()
except ValueError as error:
    print(error)
"""
    root = Path(__file__).resolve().parents[2]

    def run(workers, *names):
        command = [sys.executable, "-c", script, str(workers), *names]
        environment = {**os.environ, "PYTHONPATH": str(root)}
        # `python -c` puts the current directory first; the installed console script and torchrun don't.
        command[1:2] = ["-P", "-c"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
        return done.stdout.strip() or done.stderr

    for workers in (0, 1):
        names = ("mine:f", "sub/mine.py:f", str(tmp_path / "mine.py") + ":f", "reasoning_gym")
        assert run(workers, *names) == "[[4.5, 2.0, 4.5, 1.0]]"
    reason = "can't be imported: ModuleNotFoundError: No module named 'no_such_thing' (broken.py:2)"
    assert run(0, "broken:f").endswith(reason) and run(1, "broken.py:f").endswith(reason)
    assert "can't be imported: SystemExit: not for import" in run(1, "leaves:f")


# --- processes


def test_what_a_late_function_started_ends_with_it(pool, tmp_path):
    rows = [{"file": str(tmp_path / "pid")}]
    scores = score(pool(f"{USER}:starts_a_child", workers=1, timeout_s=2.0, on_error="exclude"), rows)
    assert scores.late == 1 and ended(int((tmp_path / "pid").read_text()))


def test_workers_ignore_signals_meant_for_the_rank(pool):
    steady = pool(f"{USER}:process", workers=1)
    pid = int(score(steady, [{}]).reward[0])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(pid, number)
    assert score(steady, [{}]).reward == [pid]


def test_an_idle_worker_that_is_killed_is_replaced(pool):
    steady = pool(f"{USER}:process", workers=1)
    pid = int(score(steady, [{}]).reward[0])
    os.kill(pid, signal.SIGKILL)
    assert ended(pid)
    assert score(steady, [{}]).reward != [pid]


def test_closing_ends_workers_and_fails_what_is_open(pool):
    closing = pool(f"{USER}:process", MINE, workers=1)
    pid = int(score(closing, [{}]).reward[0])
    pending = closing.score(["p"], ["r"], [{"do": "hang"}], [(0, 0, 0)])
    begin = time.monotonic()
    closing.close()
    closing.close()
    assert time.monotonic() - begin < 5 and ended(pid)
    for late in (pending, closing.score(["p"], ["r"], [{}], [(0, 0, 0)])):
        with pytest.raises(UserError, match="the reward pool is closed"):
            late.result(5)


def test_workers_die_with_a_killed_rank():
    script = f"""
import time
from spmd_rl.config.schema import RewardConfig, RewardFunctionConfig
from spmd_rl.engines.reward.pool import RewardPool
from spmd_rl.engines.reward.scores import labels
functions = [RewardFunctionConfig(function={USER + ":process"!r}), RewardFunctionConfig(function={MINE!r})]
pool = RewardPool(RewardConfig(functions, workers=1))
pid = int(pool.score([""], [""], [{{}}], [(0, 0, 0)]).result(60).parts[0][0])
pool.score([""], [""], [{{"do": "spin"}}], [(0, 0, 0)])
time.sleep(0.5)  # the worker is in the endless loop now
print(pid, flush=True)
time.sleep(3600)
"""
    root = Path(__file__).resolve().parents[2]
    rank = subprocess.Popen([sys.executable, "-c", script], cwd=root, stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    pid = int(rank.stdout.readline())
    rank.kill()
    rank.wait()
    rank.stdout.close()
    try:
        assert ended(pid)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# --- names and dealing


def test_names_are_short_and_never_alike():
    functions = ["math_verify", "a:f", "b.py:g", "c:f", "math_verify"]
    names = RewardPool(make("exact_match", "os.path:join", workers=0)).names
    assert names == ["exact_match", "join"]
    assert labels(make(*functions).functions) == ["math_verify#1", "a:f", "g", "c:f", "math_verify#2"]


def test_every_call_is_dealt_once():
    specs = [FunctionSpec("a"), FunctionSpec("b", batched=True), FunctionSpec("c"), FunctionSpec("d")]
    for samples in (0, 1, 3, 50):
        parts = deal(specs, [False, False, False, True], samples, workers=3)
        calls = [call for part in parts for call in part]
        dealt = sorted((call.function, sample) for call in calls for sample in call.samples)
        assert dealt == [(f, s) for f in range(4) for s in range(samples)]
        assert len({id(part) for part in parts}) == len(parts) and all(parts)
        for part in parts:  # nothing async among what a worker does one by one
            assert len({c.function == 3 for c in part}) == 1
