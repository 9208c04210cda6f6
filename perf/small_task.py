"""A task that a model of some thousand parameters learns within seconds: say the letter that the prompt shows.

`make` writes a random model with a tokenizer of one token per character, the prompts and a configuration; `share` is
the reward. A random policy gets about 0.1. The letter stands before a colon, so that it must be looked up.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LETTERS = "abcdefgh"
SPECIAL = ("<pad>", "<end>")


def share(prompt: str, response: str, row: dict[str, Any]) -> float:
    """The part of the response's characters that are the prompt's letter; 0 for an empty response."""
    return response.count(row["answer"]) / len(response) if response else 0.0


def make(folder: Path, steps: int, lr: float) -> Path:
    """Writes model, data and `config.yaml` into `folder` (made where missing); returns the configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    _model(folder / "model")
    rows = [{"prompt": f"{letter}:", "answer": letter} for letter in LETTERS * 8]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    optimizer = {"lr": lr, "warmup_steps": 2}
    settings = {
        "run": {"threads": 1},
        "model": {"path": str(folder / "model"), "compute_dtype": "float32"},
        "data": {
            "train": [{"name": "letters", "path": str(folder / "train.jsonl")}],
            "max_prompt_tokens": 4,
            "chat_template": False,
        },
        "rollout": {"engine": "transformers", "dtype": "float32", "max_tokens": 6},
        "reward": {"functions": [{"function": f"{Path(__file__).resolve()}:share"}], "workers": 0},
        "train": {"steps": steps, "prompts_per_step": 8, "samples_per_prompt": 8, "optimizer": optimizer},
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(settings, indent=1), encoding="utf-8")  # JSON is YAML
    return path


def _model(folder: Path) -> None:
    vocabulary = {token: place for place, token in enumerate([*SPECIAL, ":", *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=":"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    pad, end = SPECIAL
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, eos_token=end).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=vocabulary[end],
        pad_token_id=vocabulary[pad],
        tie_word_embeddings=False,
        initializer_range=0.15,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
