"""vLLM inside our processes: distribution, ends, seeds, weight updates, and what it leaves of the process.

One engine start costs many seconds, so one world of one rank runs everything once, and the tests read its results.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoTokenizer

from spmd_rl.comm.world import World
from spmd_rl.config.schema import Config, DataConfig, ModelConfig, RolloutConfig
from spmd_rl.data.batch import Finish
from spmd_rl.engines.protocol import Completion, Request, RolloutEngine, Sampling
from spmd_rl.engines.rollout.build import build_rollout
from spmd_rl.engines.rollout.generate import generate
from spmd_rl.engines.rollout.versions import each_version
from tests.rollout_cases import END, drawn_by_hand, make_model, make_requests, reference_logprobs, state
from tests.world.harness import run_world

SAMPLINGS = {
    "plain": Sampling(max_tokens=20),
    "cold": Sampling(temperature=0.6, max_tokens=20),
    "cut": Sampling(temperature=1.3, top_k=9, top_p=0.8, max_tokens=20),
    "greedy": Sampling(temperature=0.0, max_tokens=20),
}


def build(world: World, folder: Path, tensor_parallel: int = 1, **rollout: Any) -> RolloutEngine:
    """The engine as a run builds it, in float32."""
    settings = RolloutConfig(
        engine="vllm", dtype="float32", max_tokens=24, max_sequences=16, kv_cache_gib=0.125, **rollout
    )
    config = Config(model=ModelConfig(path=str(folder)), data=DataConfig(max_prompt_tokens=104), rollout=settings)
    mesh = world.mesh(range(world.size), {"dp": world.size // tensor_parallel, "tp": tensor_parallel})
    return build_rollout(config, world, mesh, AutoTokenizer.from_pretrained(folder))


def plain(done: list[Completion]) -> list[dict[str, Any]]:
    """For JSON."""
    return [
        {"id": c.id, "tokens": c.tokens, "logprobs": c.logprobs, "finish": c.finish.name, "version": c.version}
        for c in done
    ]


def difference(folder: Path, requests: list[Request], done: list[Completion]) -> float:
    """Greatest difference from the log-probabilities of one whole forward pass."""
    expected = reference_logprobs(folder, requests, done)
    return max(float((torch.tensor(c.logprobs) - e_R).abs().max()) for c, e_R in zip(done, expected, strict=True))


def exercise(world: World, folder: str, other: str) -> dict[str, Any]:
    """Everything that one rank can do, with one engine start per set of weights."""
    old, new = Path(folder), Path(other)
    environment, threads, set_num_threads = dict(os.environ), torch.get_num_threads(), torch.set_num_threads
    random.seed(5), torch.manual_seed(5)
    engine = build(world, old)
    result: dict[str, Any] = {
        "drawn_after_start": [random.random(), float(torch.rand(()))],
        "threads": [threads, torch.get_num_threads(), torch.set_num_threads is set_num_threads],
        "environment": sorted(
            name
            for name in {*os.environ, *environment}
            if os.environ.get(name) != environment.get(name) and not name.startswith("VLLM_")
        ),
    }
    state_before = torch.get_rng_state()
    for name, sampling in SAMPLINGS.items():
        requests = make_requests(sampling=sampling)
        done = generate(engine, requests, deadline_s=60)
        result[name] = plain(done)
        result[f"{name} difference"] = difference(old, requests, done)
    result["generators untouched"] = torch.equal(state_before, torch.get_rng_state())

    requests = make_requests(prompts=8, samples=4)
    result["together"] = plain(generate(engine, requests, deadline_s=60))
    result["backwards"] = plain(generate(engine, requests[::-1], deadline_s=60)[::-1])
    result["alone"] = plain([generate(engine, [request], deadline_s=60)[0] for request in requests[:3]])
    long = make_requests(prompts=16, samples=1, length=70, sampling=Sampling(max_tokens=4))  # over the prefill budget
    result["long difference"] = difference(old, long, generate(engine, long, deadline_s=60))

    result["computed"] = _computed_tokens(engine)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    result["stop"] = _stop_strings(engine, tokenizer)
    result["update"] = _update(engine, old, new)
    result["kept"] = _kept(engine, old, new)
    result["partial"] = _partial(engine, old, new)
    result["too long"] = _message(lambda: engine.submit(make_requests(length=200)))
    engine.close()
    result["group alive"] = dist.is_initialized()

    fresh = build(world, new)
    result["fresh greedy"] = plain(generate(fresh, _update_requests(), deadline_s=60))
    result["fresh continued"] = _continued(fresh, result["update"]["begun"])
    fresh.close()
    return result


def _message(action: Any) -> str:
    try:
        action()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def _computed_tokens(engine: Any) -> list[list[int]]:
    """How many tokens each of the first two steps computes, for two groups of five: short prompts, then longer ones."""
    executor, counts = engine._engine.model_executor, []
    execute = executor.execute_model

    def counting(scheduler_output: Any, *arguments: Any, **options: Any) -> Any:
        counts.append(scheduler_output.total_num_scheduled_tokens)
        return execute(scheduler_output, *arguments, **options)

    executor.execute_model = counting
    found = []
    for length in (20, 70):
        counts.clear()
        generate(engine, make_requests(prompts=2, samples=5, length=length, seed=length), deadline_s=60)
        found.append(counts[:2])
    executor.execute_model = execute
    return found


def _stop_strings(engine: RolloutEngine, tokenizer: Any) -> dict[str, Any]:
    free = generate(engine, make_requests(), deadline_s=60)
    stop = next(tokenizer.decode(c.tokens[k]) for c in free for k in range(2, len(c.tokens)) if 35 < c.tokens[k] < 90)
    stopped = generate(engine, make_requests(sampling=Sampling(max_tokens=20, stop=(stop,))), deadline_s=60)
    (token,) = tokenizer.encode(stop)
    return {"token": token, "free": plain(free), "stopped": plain(stopped)}


def _update_requests() -> list[Request]:
    """Greedy, and with prompts of more than one cache block, so that the prefix cache has something to keep."""
    return make_requests(sampling=Sampling(temperature=0.0, max_tokens=24), length=70, prompts=8, samples=1)


def _update(engine: RolloutEngine, old: Path, new: Path) -> dict[str, Any]:
    """Weights change while requests run whose prompts are in the prefix cache."""
    result: dict[str, Any] = {"old greedy": plain(generate(engine, _update_requests(), deadline_s=60))}
    engine.submit(_update_requests())
    early = [completion for _ in range(6) for completion in engine.step()]
    weights = iter(state(new).items())
    engine.load_weights(weights, version=5)
    result["consumed"] = next(weights, None) is None
    # The same prompts again, beside the requests that computed them under the old weights.
    engine.submit([replace(request, id=(0, request.id[1], 50)) for request in _update_requests()])
    late: list[Completion] = []
    while engine.unfinished():
        late += engine.step()
    late.sort(key=lambda completion: completion.id)
    result["begun"] = plain([completion for completion in late if completion.id[2] != 50])
    result["beside"] = plain([completion for completion in late if completion.id[2] == 50])
    result["ended early"] = len(early)  # by an end token
    result["new greedy"] = plain(generate(engine, _update_requests(), deadline_s=60))
    some = [(name, tensor) for name, tensor in state(new).items() if name != "model.norm.weight"]
    result["missing"] = _message(lambda: engine.load_weights(some, version=6))
    nan = {name: tensor * float("nan") if "up_proj" in name else tensor for name, tensor in state(old).items()}
    engine.load_weights(nan.items(), version=7)
    result["nan"] = plain(generate(engine, make_requests(), deadline_s=60))
    engine.load_weights(state(old).items(), version=8)
    result["old again"] = plain(generate(engine, _update_requests(), deadline_s=60))
    return result


def _kept(engine: Any, old: Path, new: Path) -> dict[str, Any]:
    """As `_update`, but the running requests keep their cache."""
    engine.submit(_update_requests())
    done = [completion for _ in range(6) for completion in engine.step()]
    engine.load_weights(state(new).items(), version=9, keep_cache=True)
    engine.submit([replace(request, id=(0, request.id[1], 50)) for request in _update_requests()])
    while engine.unfinished():
        done += engine.step()
    done.sort(key=lambda completion: completion.id)
    prompts = {request.id: request for request in _update_requests()}
    across = [completion for completion in done if completion.id[2] != 50 and len(completion.versions) == 2]
    by_hand = [
        drawn_by_hand(prompts[c.id], [old, new], [int(v == 9) for v in each_version(c.versions)], keep_cache=True)
        for c in across
    ]
    beside = [completion for completion in done if completion.id[2] == 50]
    return {"across": plain(across), "by hand": by_hand, "beside": plain(beside)}


def _partial(engine: Any, old: Path, new: Path) -> dict[str, Any]:
    """Requests are taken out: running ones, those that wait for their group's first, those that wait for a slot."""
    engine.load_weights(state(old).items(), version=10)
    requests = make_requests(prompts=8, samples=3)
    engine.submit(requests)
    ended = [completion for _ in range(5) for completion in engine.step()]
    first = engine.abort([request.id for request in requests[::2]])
    ended += engine.step()
    first += engine.abort()
    left = engine.unfinished()
    begun = {completion.id: completion for completion in first}
    again = [replace(request, begun=begun[request.id]) for request in requests if request.id in begun]
    same = generate(engine, again, deadline_s=60)
    by_id = {completion.id: completion for completion in (*ended, *same)}
    result = {
        "lengths": sorted(len(completion.tokens) for completion in first),
        "finishes": sorted({completion.finish.name for completion in first}),
        "left": left,
        "kept": [by_id[c.id].tokens[: len(c.tokens)] == c.tokens for c in first],
        "difference": difference(old, requests, [by_id[request.id] for request in requests]),
        "versions": [completion.versions for completion in by_id.values()],
        "longest": max(len(completion.tokens) for completion in by_id.values()),
    }
    engine.submit(_update_requests())
    for _ in range(6):
        engine.step()
    greedy = {completion.id: completion for completion in engine.abort()}
    engine.load_weights(state(new).items(), version=11)
    again = [replace(request, begun=greedy[request.id]) for request in _update_requests() if request.id in greedy]
    result["next version"] = plain(generate(engine, again, deadline_s=60))
    result["next versions"] = [completion.versions[0] for completion in greedy.values()]
    stop = Sampling(max_tokens=24, stop=("x",))
    result["stop"] = _message(lambda: engine.submit([replace(again[0], sampling=stop)]))
    return result


def _continued(fresh: RolloutEngine, begun: list[dict[str, Any]]) -> list[list[int]]:
    """What the new weights alone make of the first tokens of the requests that ran across the update."""
    prompts = {request.id: request.prompt for request in _update_requests()}
    greedy = Sampling(temperature=0.0, max_tokens=18)
    requests = [Request(done["id"], (*prompts[done["id"]], *done["tokens"][:6]), greedy, seed=0) for done in begun]
    return [completion.tokens for completion in generate(fresh, requests, deadline_s=60)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    old = make_model(tmp_path_factory.mktemp("old"))
    return old, make_model(tmp_path_factory.mktemp("new"), seed=1)


@pytest.fixture(scope="module")
def results(folders: tuple[Path, Path]) -> dict[str, Any]:
    arguments = {"folder": str(folders[0]), "other": str(folders[1])}
    world = run_world(exercise, ranks=1, launcher="single", timeout_s=240, args=arguments).check()
    assert world.stderr.strip() == ""  # neither warnings nor progress bars
    return world.ranks[0]


def tokens(done: list[dict[str, Any]]) -> list[list[int]]:
    return [completion["tokens"] for completion in done]


@pytest.mark.parametrize("name", SAMPLINGS)
def test_logprobs_are_those_of_the_distribution_that_was_asked_for(results: dict[str, Any], name: str):
    """The same definition as the transformers engine's; N6 and N7: generation_config.json names other values."""
    assert results[f"{name} difference"] < 2e-4


def test_prompts_beyond_the_prefill_budget(results: dict[str, Any]):
    assert results["long difference"] < 2e-4


def test_responses_end_where_they_should(results: dict[str, Any]):
    """N8: with all end ids that the model lists, which belong to the response."""
    for completion in results["together"]:
        assert len(completion["tokens"]) == len(completion["logprobs"])
        assert not set(completion["tokens"][:-1]) & set(END)
        ended = completion["tokens"][-1] in END
        assert completion["finish"] == ("STOP" if ended else "LENGTH")
        assert ended or len(completion["tokens"]) == 20
    assert {completion["finish"] for completion in results["together"]} == {"STOP", "LENGTH"}


def test_a_seed_has_one_answer_in_any_company(results: dict[str, Any]):
    assert tokens(results["backwards"]) == tokens(results["together"])
    assert tokens(results["alone"]) == tokens(results["together"])[:3]
    assert len({tuple(t) for t in tokens(results["together"])}) > 24  # some end at once


def test_the_prompt_of_a_group_is_computed_once(results: dict[str, Any]):
    """First each prompt; then one token for each of the ten samples, but for a first one that has ended already."""
    short, long = results["computed"]
    assert short[0] == 20 + 22
    assert long[0] == 70 + 72
    assert 8 <= short[1] <= 10
    assert 8 <= long[1] <= 10


def test_stop_strings(results: dict[str, Any]):
    stop, cut = results["stop"], 0
    for free, stopped in zip(stop["free"], stop["stopped"], strict=True):
        if stop["token"] in free["tokens"]:
            first = free["tokens"].index(stop["token"]) + 1
            assert stopped["tokens"] == free["tokens"][:first]
            assert stopped["finish"] == "STOP"
            cut += 1
        else:
            assert stopped["tokens"] == free["tokens"]
    assert cut > 0


def test_after_an_update_only_the_new_weights_speak(results: dict[str, Any]):
    """D11: prefix caching is on, and the prompts were cached under the old weights."""
    update = results["update"]
    assert update["consumed"]
    assert tokens(update["new greedy"]) == tokens(update["beside"]) == tokens(results["fresh greedy"])
    assert tokens(update["new greedy"]) != tokens(update["old greedy"])
    assert {completion["version"] for completion in update["new greedy"]} == {5}
    for mine, theirs in zip(update["new greedy"], results["fresh greedy"], strict=True):
        torch.testing.assert_close(mine["logprobs"], theirs["logprobs"], rtol=0, atol=1e-5)
    assert tokens(update["old again"]) == tokens(update["old greedy"])


def test_running_requests_go_on_with_the_new_weights(results: dict[str, Any]):
    update = results["update"]
    assert len(update["begun"]) == 8 - update["ended early"] >= 4
    old = {tuple(done["id"]): done["tokens"] for done in update["old greedy"]}
    assert [t[:6] for t in tokens(update["begun"])] == [old[tuple(done["id"])][:6] for done in update["begun"]]
    assert [t[6:] for t in tokens(update["begun"])] == results["fresh continued"]
    assert {completion["version"] for completion in update["begun"]} == {0}


def test_running_requests_may_keep_their_cache(results: dict[str, Any]):
    """And requests that begin after the update see nothing of it, though their prompts are the same."""
    assert len(results["kept"]["across"]) >= 4
    assert tokens(results["kept"]["across"]) == results["kept"]["by hand"]
    assert tokens(results["kept"]["beside"]) == tokens(results["fresh greedy"])


def test_aborted_requests_go_on(results: dict[str, Any]):
    partial = results["partial"]
    assert partial["left"] == 0 and partial["finishes"] == ["ABORTED"] and all(partial["kept"])
    assert partial["lengths"][0] == 0 and partial["lengths"][-1] >= 5
    assert partial["difference"] < 2e-4 and partial["longest"] == 20
    assert all(len(runs) == 1 and runs[0][0] == 10 for runs in partial["versions"])
    assert partial["next versions"] == [[10, 6]] * len(results["update"]["begun"])
    assert tokens(partial["next version"]) == tokens(results["update"]["begun"])
    assert "vLLM cannot go on with a response that has stop strings" in partial["stop"]


def test_missing_weights_are_named(results: dict[str, Any]):
    assert results["update"]["missing"].startswith("ValueError: weights of version 6: 1 parameters were not sent")
    assert "model.norm.weight" in results["update"]["missing"]


def test_nan_reaches_the_caller(results: dict[str, Any]):
    """N12."""
    for completion in results["update"]["nan"]:
        assert torch.tensor(completion["logprobs"]).isnan().all()
        assert all(0 <= token < 272 for token in completion["tokens"])


def test_what_does_not_fit_names_its_sample(results: dict[str, Any]):
    assert results["too long"] == (
        "ValueError: sample (0, 0, 0): 200 prompt tokens and 20 of response are 220, but the engine holds 128"
    )


def test_the_process_stays_ours(results: dict[str, Any]):
    random.seed(5), torch.manual_seed(5)
    assert results["drawn_after_start"] == [random.random(), float(torch.rand(()))]
    assert results["generators untouched"]
    before, after, same_function = results["threads"]
    assert before == after == 1 and same_function
    assert results["environment"] == []
    assert results["group alive"]


def two_ranks(world: World, folder: str, other: str) -> dict[str, Any]:
    """Two engines of one rank each, then one engine of two ranks."""
    requests = make_requests(prompts=6, samples=2)
    single = build(world, Path(folder))
    mine = generate(single, requests[world.rank * 6 : world.rank * 6 + 6], deadline_s=60)
    single.close()
    double = build(world, Path(folder), tensor_parallel=2)
    both = generate(double, requests, deadline_s=60)
    worst = difference(Path(folder), requests, both)
    double.load_weights(state(Path(other)).items(), version=1)
    updated = generate(double, requests, deadline_s=60)
    shared_memory = [name for name in os.listdir("/dev/shm") if "cpushm" in name]
    double.close()
    return {
        "mine": plain(mine),
        "both": plain(both),
        "difference": worst,
        "updated difference": difference(Path(other), requests, updated),
        "updated": plain(updated),
        "shared memory": shared_memory,
    }


def test_two_ranks_as_two_engines_and_as_one(folders: tuple[Path, Path], results: dict[str, Any]):
    arguments = {"folder": str(folders[0]), "other": str(folders[1])}
    first, second = run_world(two_ranks, ranks=2, timeout_s=240, args=arguments).check().ranks
    expected = tokens(results["together"])
    chosen = [expected[prompt * 4 + sample] for prompt in range(6) for sample in range(2)]  # it drew 4 of each prompt
    assert tokens(first["mine"]) + tokens(second["mine"]) == chosen
    assert first["both"] == second["both"]
    assert tokens(first["both"]) == chosen
    assert max(first["difference"], first["updated difference"]) < 2e-4
    assert first["updated"] == second["updated"]
    assert tokens(first["updated"]) != tokens(first["both"])
    assert first["shared memory"] == []  # nothing that a killed run would leave behind, or two runs would share
    assert Finish.STOP.name in {completion["finish"] for completion in first["both"]}
