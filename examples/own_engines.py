"""Somebody's own rollout engine and own trainer, joined to the stream and the weight transfer of spmd_rl.

    torchrun --nproc-per-node=3 examples/own_engines.py

The policy is a table of next-letter probabilities, the trainer plain REINFORCE; rank 0 trains, the others draw. What
they learn is to write words in which each letter follows the last one in the alphabet.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # when run from a checkout that is not installed

from spmd_rl.comm.placement import detect  # noqa: E402
from spmd_rl.service import RolloutService, Settings, TrainService, init_engines  # noqa: E402

LETTERS, LENGTH, SAMPLES = 8, 6, 16
PROMPTS = [torch.tensor([letter]) for letter in range(LETTERS)]  # the first letter


class TableEngine:
    """Draws words from a table [letter, next letter] of logits."""

    def __init__(self, seed: int) -> None:
        self.table = torch.zeros(LETTERS, LETTERS)
        self.generator = torch.Generator().manual_seed(seed)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.table.copy_(dict(weights)["table"])

    def draw(self, prompt: Tensor) -> list[Tensor]:
        word = prompt.expand(SAMPLES, 1)
        for _ in range(LENGTH):
            probs = self.table[word[:, -1]].softmax(-1)
            word = torch.cat([word, torch.multinomial(probs, 1, generator=self.generator)], 1)
        return list(word[:, 1:])


def reward(prompt: Tensor, response: Tensor) -> float:
    word = torch.cat([prompt, response])
    return float(((word[:-1] + 1) % LETTERS == word[1:]).float().mean())


def draw(service: RolloutService) -> None:
    engine = TableEngine(service.job.rank)
    while not service.ended:
        service.notify_weight_sync(engine)
        work = service.next_prompt(wait_s=0.05)
        if work is not None:
            responses = engine.draw(work.prompt)
            rewards = torch.tensor([reward(work.prompt, response) for response in responses])
            service.put_experience(work, {"prompt": [work.prompt] * SAMPLES, "response": responses, "reward": rewards})


def train(service: TrainService) -> None:
    """Of one rank; several would add up their gradients before the optimizer's step."""
    table = torch.zeros(LETTERS, LETTERS, requires_grad=True)
    optimizer = torch.optim.Adam([table], lr=0.3)
    service.notify_weight_sync(lambda: [("table", table)])
    while service.step < service.settings.steps:
        optimizer.zero_grad()
        rewards = []
        for batch in service.get_experience(["prompt", "response", "reward"], tokens=200):
            reward_S = batch["reward"].as_scalars()
            advantage_S = reward_S - reward_S.mean()
            words = [torch.cat(pair) for pair in zip(batch["prompt"].rows(), batch["response"].rows(), strict=True)]
            for word, advantage in zip(words, advantage_S, strict=True):
                logprob_R = table.log_softmax(-1)[word[:-1], word[1:]]
                (-advantage * logprob_R.sum() / len(reward_S)).backward()
            rewards += reward_S.tolist()
        optimizer.step()
        service.notify_weight_sync(lambda: [("table", table)])
        print(f"step {service.step}: mean reward {sum(rewards) / len(rewards):.3f} of {len(rewards)} words", flush=True)


if __name__ == "__main__":
    ranks = range(detect(os.environ).size)
    settings = Settings([0], ranks[1:], ("prompt", "response", "reward"), steps=20, prompts_per_step=len(PROMPTS))
    with init_engines(settings) as service:
        service.put_prompts(PROMPTS)
        train(service) if isinstance(service, TrainService) else draw(service)
