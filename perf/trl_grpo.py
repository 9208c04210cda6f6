"""GRPO by TRL's `GRPOTrainer`, as perf/end_to_end.py describes the job; runs inside .venvs/trl, without our package.

    torchrun --standalone --nproc-per-node=2 perf/trl_grpo.py job.json

job.json: model, generator, params, size, seed (of the generator), run_seed, system_prompt, examples, reward (a built-in
of ours), steps, prompts_per_step, samples_per_prompt, accumulation (micro-batches per step), max_tokens,
temperature, lr, warmup_steps, out. OMP_NUM_THREADS sets the threads.
Each rank appends one JSON object per step to `<out>.rank<k>`: step, seconds, samples, generated_tokens,
trained_tokens, reward_sum.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import reasoning_gym
import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Meter(TrainerCallback):
    """Counts what the reward function sees, and closes a line at the end of each step."""

    def __init__(self, out: Path, prompt_tokens: dict[str, int]) -> None:
        self.out = out
        self.prompt_tokens = prompt_tokens
        self.begin = time.monotonic()
        self.clear()

    def clear(self) -> None:
        self.samples = self.generated = self.trained = 0
        self.reward_sum = 0.0

    def count(self, question: str, completion_ids: list[int], reward: float) -> None:
        self.samples += 1
        self.generated += len(completion_ids)
        self.trained += len(completion_ids) + self.prompt_tokens[question]
        self.reward_sum += reward

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.begin = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        now = time.monotonic()
        line = {
            "step": state.global_step,
            "seconds": now - self.begin,
            "samples": self.samples,
            "generated_tokens": self.generated,
            "trained_tokens": self.trained,
            "reward_sum": self.reward_sum,
        }
        with self.out.open("a") as stream:
            stream.write(json.dumps(line) + "\n")
        self.begin = now
        self.clear()


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    tasks = reasoning_gym.create_dataset(job["generator"], size=job["size"], seed=job["seed"], **job["params"])
    judge = runpy.run_path("spmd_rl/engines/reward/builtin.py")[job["reward"]]
    rows: list[dict[str, Any]] = []
    lengths: dict[str, int] = {}
    for index in range(job["size"]):
        entry = tasks[index]
        prompt = [{"role": "system", "content": job["system_prompt"]}]
        for question, response in job["examples"]:
            prompt += [{"role": "user", "content": question}, {"role": "assistant", "content": response}]
        prompt.append({"role": "user", "content": entry["question"]})
        tokens = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
        lengths[entry["question"]] = len(tokens)
        rows.append({"prompt": prompt, "index": index})
    meter = Meter(Path(f"{job['out']}.rank{rank}"), lengths)

    def reward(prompts: Any, completions: Any, completion_ids: Any, index: list[int], **_: Any) -> list[float]:
        scores = []
        for row, completion, tokens in zip(index, completions, completion_ids, strict=True):
            entry = tasks[row]
            score = judge("", completion[0]["content"], entry)
            meter.count(entry["question"], tokens, score)
            scores.append(score)
        return scores

    per_rank, rest = divmod(job["prompts_per_step"] * job["samples_per_prompt"], ranks * job["accumulation"])
    assert rest == 0, "the samples of a step must divide among ranks and micro-batches"
    config = GRPOConfig(
        output_dir=f"{job['out']}.trainer",
        per_device_train_batch_size=per_rank,
        gradient_accumulation_steps=job["accumulation"],
        num_generations=job["samples_per_prompt"],
        max_completion_length=job["max_tokens"],
        temperature=job["temperature"],
        max_steps=job["steps"],
        learning_rate=job["lr"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=job["warmup_steps"],
        optim="adamw_torch",
        beta=0.0,
        bf16=True,  # float32 weights under autocast, as ours
        use_cpu=not torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
        ddp_backend="gloo" if ranks > 1 and not torch.cuda.is_available() else None,
        gradient_checkpointing=False,
        shuffle_dataset=True,
        seed=job["run_seed"],
        save_strategy="no",
        logging_steps=1000,
        disable_tqdm=True,
    )
    GRPOTrainer(
        model=job["model"],
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[meter],
    ).train()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
