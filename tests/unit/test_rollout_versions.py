"""Weights that change while responses are drawn, and responses that are taken out and go on: exact, in float32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from spmd_rl.data.batch import Finish
from spmd_rl.engines.protocol import Completion, Sampling
from spmd_rl.engines.rollout.desk import Desk
from spmd_rl.engines.rollout.generate import generate
from spmd_rl.engines.rollout.seeds import continued_seed
from spmd_rl.engines.rollout.transformers_engine import TransformersEngine
from spmd_rl.engines.rollout.versions import Versions, each_version, first_version
from tests.rollout_cases import END, drawn_by_hand, make_model, make_requests, state

SAMPLING = Sampling(max_tokens=20)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Version 0, 1 and 2 of the weights."""
    return [make_model(tmp_path_factory.mktemp(str(seed)), seed=seed) for seed in range(3)]


def engine(folder: Path, max_sequences: int = 5) -> TransformersEngine:
    """Of fewer slots than the 12 requests of `make_requests`, so that some wait when weights change."""
    return TransformersEngine(str(folder), AutoTokenizer.from_pretrained(folder), frozenset(END), max_sequences, 64)


def drain(running: TransformersEngine) -> list[Completion]:
    done = []
    while running.unfinished():
        done += running.step()
    return done


@pytest.mark.parametrize("keep_cache", [False, True], ids=["computed anew", "kept"])
def test_each_token_comes_from_the_weights_of_its_version(folders: list[Path], keep_cache: bool) -> None:
    running = engine(folders[0])
    requests = make_requests(sampling=SAMPLING)
    running.submit(requests)
    done = [completion for _ in range(7) for completion in running.step()]
    running.load_weights(state(folders[1]).items(), 1, keep_cache)
    done += [completion for _ in range(4) for completion in running.step()]
    running.load_weights(state(folders[2]).items(), 2, keep_cache)
    done += drain(running)
    assert sorted(completion.id for completion in done) == sorted(request.id for request in requests)
    by_id = {request.id: request for request in requests}
    mixed = 0
    for completion in done:
        versions = each_version(completion.versions)
        assert len(versions) == len(completion.tokens) and versions == sorted(versions)
        assert completion.version == versions[0]
        assert drawn_by_hand(by_id[completion.id], folders, versions, keep_cache) == completion.tokens
        mixed += len(completion.versions) == 3
    assert mixed  # one ran across both


def test_an_aborted_response_goes_on_as_if_nothing_had_happened(folders: list[Path]) -> None:
    requests = make_requests(sampling=SAMPLING)
    whole = {completion.id: completion for completion in generate(engine(folders[0]), requests, deadline_s=60)}
    running = engine(folders[0])
    running.submit(requests)
    done = [completion for _ in range(6) for completion in running.step()]
    long = next(request.id for request in requests[:5] if len(whole[request.id].tokens) > 8)
    some = running.abort([requests[11].id, long])
    assert [completion.id for completion in some] == [long, requests[11].id]
    assert [len(completion.tokens) for completion in some] == [6, 0]  # the last one had not begun
    done += running.step()
    rest = running.abort()
    assert running.unfinished() == 0 and {completion.finish for completion in rest} == {Finish.ABORTED}
    assert [completion.id for completion in rest] == [r.id for r in requests if r.id in {c.id for c in rest}]
    elsewhere = engine(folders[0], max_sequences=3)
    begun = {completion.id: completion for completion in (*some, *rest)}
    elsewhere.submit([replace(request, begun=begun[request.id]) for request in requests if request.id in begun])
    done += drain(elsewhere)
    assert {completion.id for completion in done} == whole.keys() and len(done) == len(whole)
    for completion in done:
        expected = whole[completion.id]
        assert (completion.tokens, completion.finish) == (expected.tokens, expected.finish)
        assert completion.versions == ((0, len(completion.tokens)),)
        torch.testing.assert_close(completion.logprobs, expected.logprobs, rtol=1e-4, atol=1e-4)


def test_a_response_goes_on_under_the_next_version(folders: list[Path]) -> None:
    running = engine(folders[0], max_sequences=12)
    requests = make_requests(sampling=SAMPLING)
    running.submit(requests)
    ended = [completion for _ in range(5) for completion in running.step()]
    begun = running.abort()
    running.load_weights(state(folders[1]).items(), 1)
    running.submit([replace(next(r for r in requests if r.id == c.id), begun=c) for c in begun])
    again = [completion for _ in range(3) for completion in running.step()]
    twice = running.abort()
    assert all(completion.versions == ((0, 5), (1, 3)) for completion in twice) and twice
    running.submit([replace(next(r for r in requests if r.id == c.id), begun=c) for c in twice])
    for completion in (*ended, *again, *drain(running)):
        versions = each_version(completion.versions)
        request = next(r for r in requests if r.id == completion.id)
        assert drawn_by_hand(request, folders, versions, keep_cache=False) == completion.tokens


def test_a_desk_lets_others_draw_in_between(folders: list[Path]) -> None:
    requests = make_requests(sampling=SAMPLING)
    whole = {completion.id: completion.tokens for completion in generate(engine(folders[0]), requests, deadline_s=60)}
    desk = Desk(engine(folders[0]))
    slips = [desk.submit(requests[:7]), desk.submit(requests[7:])]
    for _ in range(5):
        desk.step()
    left = desk.unfinished()
    desk.pause()
    others = [replace(request, id=(9, *request.id[1:])) for request in requests[:4]]
    assert [c.tokens for c in generate(desk.engine, others, deadline_s=60)] == [whole[r.id] for r in requests[:4]]
    assert desk.unfinished() == left > 0
    desk.resume()
    while desk.unfinished():
        desk.step()
    done = [completion for slip in slips for completion in slip.result()]
    assert {completion.id: completion.tokens for completion in done} == whole


def test_a_desk_puts_a_batch_aside_and_takes_it_up(folders: list[Path]) -> None:
    """It counts for nothing meanwhile, other batches end, and nothing of it is drawn twice or lost."""
    requests = make_requests(sampling=SAMPLING)
    whole = {completion.id: completion.tokens for completion in generate(engine(folders[0]), requests, deadline_s=60)}
    desk = Desk(engine(folders[0]))
    slips = [desk.submit(requests[:7]), desk.submit(requests[7:])]
    for _ in range(5):
        desk.step()
    assert desk.steps - slips[0].since == 5 and not slips[0].done()
    desk.put_aside(slips[0])
    assert max(len(request.begun.tokens) for request in slips[0].aside if request.begun) == 5
    while desk.unfinished():
        desk.step()
    assert slips[1].done() and not slips[0].done() and desk.engine.unfinished() == 0
    desk.take_up(slips[0])
    while desk.unfinished():
        desk.step()
    done = [completion for slip in slips for completion in slip.result()]
    assert {completion.id: completion.tokens for completion in done} == whole


def test_what_cannot_go_on_is_refused(folders: list[Path]) -> None:
    running = engine(folders[0])
    first, second, *_ = make_requests(sampling=SAMPLING)
    running.submit([first])
    for _ in range(3):
        running.step()
    (begun,) = running.abort()
    for request, message in (
        (replace(second, begun=begun), r"sample \(0, 0, 1\) cannot go on from sample \(0, 0, 0\)"),
        (replace(first, begun=replace(begun, finish=Finish.STOP)), "which ended by STOP"),
        (replace(first, begun=begun, sampling=Sampling(max_tokens=3)), "has 3 tokens already, of max_tokens=3"),
    ):
        with pytest.raises(ValueError, match=message):
            running.submit([request])


def test_runs_are_told_at_each_change() -> None:
    versions = Versions()
    assert versions.upto(0, 3) == () and first_version((), 3) == 3
    assert versions.upto(2, 3) == ((3, 2),)
    assert versions.upto(2, 4) == ((3, 2),)  # nothing was drawn under 4 yet
    assert versions.upto(5, 4) == ((3, 2), (4, 3))
    assert versions.upto(6, 4) == ((3, 2), (4, 4))
    assert each_version(versions.upto(6, 9)) == [3, 3, 4, 4, 4, 4]
    with pytest.raises(ValueError, match="5 tokens, but 6 have a version already"):
        versions.upto(5, 9)


def test_the_rest_of_a_response_has_a_seed_of_its_own() -> None:
    seeds = {continued_seed(seed, position) for seed in range(20) for position in range(1, 20)}
    assert len(seeds) == 380 and all(0 <= seed < 2**63 for seed in seeds)
