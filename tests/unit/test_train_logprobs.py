"""Chunked log-probabilities and entropies against log_softmax in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from spmd_rl.engines.train.logprobs import token_logprobs

ROWS, WIDTH, VOCABULARY = 13, 6, 29


def inputs(dtype: torch.dtype = torch.float64, scale: float = 3.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) * scale
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64)
    bias = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64)
    target = torch.randint(VOCABULARY, (ROWS,), generator=generator)
    hidden, weight, bias = (x.to(dtype).requires_grad_() for x in (hidden, weight, bias))
    return hidden, weight, bias, target


def reference(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.T + (0 if bias is None else bias)
    logprobs = (logits / temperature).log_softmax(-1)
    return logprobs[torch.arange(len(target)), target], -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("chunk", "block"), [(1024, 8192), (5, 7), (1, 1), (13, 29)])
def test_values_and_gradients(temperature: float, with_bias: bool, chunk: int, block: int) -> None:
    hidden, weight, bias, target = inputs()
    used_bias = bias if with_bias else None
    mine = token_logprobs(
        hidden, weight, target, temperature=temperature, bias_V=used_bias, chunk=chunk, vocabulary_block=block
    )
    want = reference(hidden, weight, used_bias, target, temperature)
    for got, expected in zip(mine, want, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-12)
    sought = [hidden, weight, bias] if with_bias else [hidden, weight]
    by_row = torch.linspace(-1, 2, ROWS, dtype=torch.float64)
    for pick in (lambda lp, h: (lp * by_row).sum(), lambda lp, h: (h * by_row).sum(), lambda lp, h: (lp * h).sum()):
        gradients = torch.autograd.grad(pick(*mine), sought, retain_graph=True)
        oracle = torch.autograd.grad(pick(*want), sought, retain_graph=True)
        for a, b in zip(gradients, oracle, strict=True):
            torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-11)


def test_gradcheck() -> None:
    hidden, weight, bias, target = inputs(scale=1.0)
    row = torch.tensor([0, 3, 3, 3, 1, 2, 7, 7, 12, 0, 0, 11, 4])

    def logprobs(h: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return token_logprobs(h, w, target, row, temperature=0.7, bias_V=b, chunk=4, vocabulary_block=10)

    assert torch.autograd.gradcheck(lambda h, w, b: logprobs(h, w, b), (hidden, weight, bias))


@pytest.mark.parametrize("chunk", [1024, 4, 1])
def test_several_targets_of_one_hidden_state(chunk: int) -> None:
    """As if the state were repeated; states that predict nothing, and equal targets, too."""
    hidden, weight, bias, target = inputs()
    row = torch.tensor([5, 0, 5, 5, 2, 9, 9, 12, 0, 5, 2, 12, 9])
    target[3] = target[0]
    mine = token_logprobs(hidden, weight, target, row, temperature=0.6, bias_V=bias, chunk=chunk, vocabulary_block=8)
    want = reference(hidden[row], weight, bias, target, 0.6)
    for got, expected in zip(mine, want, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-12)
    by_row = torch.linspace(-1, 2, ROWS, dtype=torch.float64)
    gradients = torch.autograd.grad((mine[0] * by_row + mine[1] * by_row**2).sum(), [hidden, weight, bias])
    oracle = torch.autograd.grad((want[0] * by_row + want[1] * by_row**2).sum(), [hidden, weight, bias])
    for a, b in zip(gradients, oracle, strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-11)


def test_case_n6_temperature_divides_the_logits() -> None:
    hidden, weight, _, target = inputs()
    sampled = token_logprobs(hidden, weight, target, temperature=0.6)[0]
    torch.testing.assert_close(sampled, token_logprobs(hidden / 0.6, weight, target)[0])
    assert not torch.allclose(sampled, token_logprobs(hidden, weight, target)[0], atol=1e-2)
    with pytest.raises(ValueError, match="temperature must be above 0"):
        token_logprobs(hidden, weight, target, temperature=0.0)


def test_float32_is_as_exact_as_float32_can_be() -> None:
    hidden, weight, bias, target = inputs(torch.float32, scale=20.0)
    got = token_logprobs(hidden, weight, target, bias_V=bias, chunk=4, vocabulary_block=8)
    want = reference(hidden.double(), weight.double(), bias.double(), target, 1.0)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, atol=2e-5, rtol=2e-6)


def test_bfloat16_sums_in_float32() -> None:
    """Logits of bfloat16 products, but sums over the vocabulary and over chunks in float32."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 8, generator=generator).bfloat16().requires_grad_()
    weight = (torch.randn(3000, 8, generator=generator) * 0.1).bfloat16().requires_grad_()
    target = torch.randint(3000, (64,), generator=generator)
    logprob, entropy = token_logprobs(hidden, weight, target, chunk=4, vocabulary_block=500)
    assert logprob.dtype == entropy.dtype == torch.float32
    want_logprob, want_entropy = reference(hidden.double(), weight.double(), None, target, 1.0)
    # One logit's rounding; the sum over 3000 adds none.
    assert float((logprob - want_logprob).detach().abs().max()) < 5e-3
    assert float((entropy - want_entropy).detach().abs().max()) < 5e-4
    got = torch.autograd.grad(logprob.sum(), [hidden, weight])
    want = torch.autograd.grad(want_logprob.sum(), [hidden, weight])
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.bfloat16
        assert float((a.double() - b).norm() / b.norm()) < 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_logits_change_nothing(dtype: torch.dtype) -> None:
    """None, a few or all blocks kept: the same bits, also when the backward pass runs twice."""
    results = []
    for kept_bytes in (0, 5 * 7 * dtype.itemsize * 3, 1 << 20):
        hidden, weight, bias, target = inputs(dtype)
        out = token_logprobs(
            hidden, weight, target, temperature=0.7, bias_V=bias, chunk=5, vocabulary_block=7, kept_bytes=kept_bytes
        )
        total = out[0].sum() + 0.1 * out[1].sum()
        first = torch.autograd.grad(total, [hidden, weight, bias], retain_graph=True)
        results.append([*out, *first, *torch.autograd.grad(total, [hidden, weight, bias])])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_extreme_logits_stay_finite() -> None:
    weight = torch.tensor([[1.0], [-1.0], [0.0]], requires_grad=True)
    hidden = torch.tensor([[3e4], [-3e4], [0.0]], requires_grad=True)
    logprob, entropy = token_logprobs(hidden, weight, torch.tensor([0, 0, 2]), vocabulary_block=1)
    assert logprob.tolist() == pytest.approx([0.0, -6e4, -torch.tensor(3.0).log().item()])
    assert entropy.tolist() == pytest.approx([0.0, 0.0, torch.tensor(3.0).log().item()])
    (logprob.sum() + entropy.sum()).backward()
    assert hidden.grad is not None and bool(hidden.grad.isfinite().all())
    assert weight.grad is not None and bool(weight.grad.isfinite().all())


def test_no_rows() -> None:
    hidden, weight, _, _ = inputs()
    logprob, entropy = token_logprobs(hidden[:0], weight, torch.empty(0, dtype=torch.int64))
    assert logprob.shape == entropy.shape == (0,)
    logprob.sum().backward()
    assert weight.grad is not None and float(weight.grad.abs().sum()) == 0.0


def test_only_what_is_asked_for_gets_a_gradient() -> None:
    hidden, weight, _, target = inputs()
    frozen = weight.detach()
    token_logprobs(hidden, frozen, target)[0].sum().backward()
    assert hidden.grad is not None and frozen.grad is None


def test_no_tensor_of_tokens_by_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest float tensor that any operation makes, forward and backward, is a chunk times a block."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(tensor, Tensor):
                    self.elements = max(self.elements, tensor.numel())
            return out

    hidden = torch.randn(512, 4, requires_grad=True)
    weight = torch.randn(1000, 4, requires_grad=True)
    target = torch.zeros(512, dtype=torch.int64)
    with Largest() as largest:
        token_logprobs(hidden, weight, target, chunk=64, vocabulary_block=100)[0].sum().backward()
    assert largest.elements <= 64 * 100
