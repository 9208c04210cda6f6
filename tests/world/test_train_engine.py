"""The train engine on real ranks: the same result however the work is divided, exact state, refusal of NaN."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.tiny_model import make_tiny_model
from tests.world import train_cases as cases
from tests.world.harness import WorldResult, run_world

TIMEOUT_S = 240


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", heads=4, kv_heads=2, hidden=32, head_dim=16))


def test_same_loss_and_gradients_on_1_2_4_ranks_and_in_every_split(model: str, tmp_path: Path) -> None:
    args = {"folder": model, "out": str(tmp_path)}
    results = {}
    for ranks in (1, 2, 4):
        launcher = "single" if ranks == 1 else "torchrun"
        results[ranks] = run_world(cases.same_everywhere, ranks, launcher, TIMEOUT_S, args).check().ranks[0]
    gradients = {ranks: torch.load(tmp_path / f"gradients-{ranks}.pt") for ranks in results}
    for kind in cases.AGGREGATIONS:
        loss, norm = results[1][f"whole: {kind}"]
        assert norm > 0.01  # something flows
        want = gradients[1][f"whole: {kind}"]
        for ranks in results:
            for way in cases.WAYS:
                if (key := f"{way}: {kind}") not in results[ranks]:
                    continue
                assert results[ranks][key] == pytest.approx([loss, norm], rel=1e-5, abs=1e-7), (ranks, key)
                for name, gradient in gradients[ranks][key].items():
                    error = float((gradient - want[name]).abs().max() / norm)
                    assert error < 1e-5, (ranks, key, name, error)
    for ranks in results:
        for way in cases.WAYS:
            got = results[ranks][f"{way}: logprobs"]
            assert got == pytest.approx(results[1]["whole: logprobs"], abs=1e-5), (ranks, way)
            # Case N1; on 4 ranks two have no sample at all.
            want_n1 = {"token_mean": 0.5, "seq_mean_token_sum": 1.0, "seq_mean_token_mean": 0.0, "constant": 1 / 16}
            assert results[ranks][f"{way}: n1"] == pytest.approx(want_n1, abs=1e-6), (ranks, way)


def test_case_d3_ranks_make_the_same_number_of_passes(model: str) -> None:
    first, second = run_world(cases.case_d3, 2, "torchrun", TIMEOUT_S, {"folder": model}).check().ranks
    # 5 micro-batches of update and of logprobs, twice; then none for a step without any sample, and one of logprobs.
    assert first["forwards"] == second["forwards"] == [10, 10, 1]
    long = sum(4 + 3 * i + 90 - 3 * i - 1 for i in range(5))
    short = sum(4 + 3 * i + 15 - 1 for i in range(5))
    assert first["tokens"] == second["tokens"] == long + short + long


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_update_without_a_token_changes_nothing_but_the_count(model: str, ranks: int) -> None:
    launcher = "single" if ranks == 1 else "torchrun"
    for found in run_world(cases.skipped, ranks, launcher, TIMEOUT_S, {"folder": model}).check().ranks:
        assert found["weights"] and found["moments"]
        assert found["counted"] == [3, 1, 1]
        first, empty, last = found["metrics"]
        assert empty == {"grad_norm": 0.0, "lr": 1e-2, "train/skipped_updates": 1.0, "loss/total": 0.0}
        assert [m["train/skipped_updates"] for m in (first, last)] == [0.0, 0.0]
        assert last["grad_norm"] > 0.01 and last["lr"] == pytest.approx(5e-3)  # the schedule did not wait


def compared(result: WorldResult) -> list[dict[str, float]]:
    """Rank 0's metrics. Where a group is cut between ranks its prompt is computed on both: those tokens may differ."""
    return [{name: value for name, value in step.items() if name != "tokens/trained"} for step in result.ranks[0]]


def test_state_saved_by_2_ranks_goes_on_on_1_and_4(model: str, tmp_path: Path) -> None:
    args = {"folder": model, "out": str(tmp_path)}
    want = compared(run_world(cases.save_and_go_on, 2, "torchrun", TIMEOUT_S, args).check())
    assert [m["lr"] for m in want] == pytest.approx([7.5e-3, 2.5e-3, 0.0], abs=1e-12)
    for ranks in (1, 4):
        launcher = "single" if ranks == 1 else "torchrun"
        got = compared(run_world(cases.load_and_go_on, ranks, launcher, TIMEOUT_S, args).check())
        for mine, theirs in zip(got, want, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    weights = {ranks: torch.load(tmp_path / f"weights-{ranks}.pt") for ranks in (1, 2, 4)}
    start = safe_open(Path(model) / "model.safetensors", "pt")
    for name, value in weights[2].items():
        assert float((value - start.get_tensor(name)).abs().max()) > 1e-3  # it was trained
        for ranks in (1, 4):
            torch.testing.assert_close(weights[ranks][name], value, atol=2e-5, rtol=0, msg=f"{name} on {ranks} ranks")


@pytest.mark.parametrize("ranks", [1, 2])
def test_numerics(model: str, ranks: int) -> None:
    launcher = "single" if ranks == 1 else "torchrun"
    everyone = run_world(cases.numerics, ranks, launcher, TIMEOUT_S, {"folder": model}).check().ranks
    for found in everyone:
        assert found["lr 0: weights equal to the bit"] and found["version"] == 20
        assert found["lr 0: largest |log ratio| in 20 steps"] == 0.0
        assert found["nan"] == "optimizer step 1: the gradient norm is nan; the weights were not changed"
        assert found["nan: weights equal to the bit"] and found["nan: version after a good step"] == 1
        for limit, (reported, true, used) in ((float(k), v) for k, v in found["norms"].items()):
            assert reported == pytest.approx(true, rel=1e-5)
            assert used == pytest.approx(true if limit == 0 else limit, rel=1e-5) and true > 0.02
        assert found["bf16: dtypes in linear layers"] == ["torch.bfloat16"]
        assert found["bf16: dtypes of masters and moments"] == ["torch.float32"]
        assert found["sent: dtypes"] == ["torch.bfloat16"] and found["sent: equal"]
        assert found["sent between steps"] == [True] * 14 and found["sent in float32: equal"]
        assert found["reference: dtypes"] == ["torch.bfloat16"] and found["reference: state"] == {}
        assert found["reference = fresh policy"] and found["reference: no gradients"]
        assert found["offloaded reference = fresh policy"] and not found["offloaded: gathered"]
        assert found["offloaded: policies"] == ["CPUOffloadPolicy"]
    assert everyone[0]["sent"] == everyone[-1]["sent"]
    with safe_open(Path(model) / "model.safetensors", "pt") as file:
        assert sorted(everyone[0]["sent"]) == sorted(file.keys())  # Hugging Face names, the tied head once
