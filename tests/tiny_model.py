"""A random model of a few thousand parameters with a real tokenizer, for tests that need a whole model in a second."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # pad, start of a turn, end of a turn
VOCAB_SIZE = 272  # 256 bytes and the special tokens, rounded up to a multiple of 16
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per UTF-8 byte, so that every string of any script survives; a ChatML chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    pad, start, end = SPECIAL_TOKENS
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, eos_token=end, additional_special_tokens=[start]
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_tiny_model(
    folder: str | Path,
    kind: str = "qwen3",
    heads: int = 8,
    kv_heads: int = 4,
    layers: int = 2,
    hidden: int = 64,
    head_dim: int = 32,
    tied: bool = True,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Writes config.json, safetensors and a tokenizer to `folder` (made where missing); returns the folder.

    kind: qwen3 | llama | gpt2 (learned absolute positions; ignores kv_heads and head_dim). The weights are drawn
    wider than usual, so that attention is far from uniform and a wrong mask or position shows in the logits.
    """
    tokenizer = make_tiny_tokenizer()
    shared = {
        "vocab_size": VOCAB_SIZE,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": tied,
        "initializer_range": 0.15,
    }
    rotary = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 4096,
    }
    absolute = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": 512}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel
        if kind == "qwen3":
            model = Qwen3ForCausalLM(Qwen3Config(**shared, **rotary))
        elif kind == "llama":
            model = LlamaForCausalLM(LlamaConfig(**shared, **rotary))
        elif kind == "gpt2":
            model = GPT2LMHeadModel(GPT2Config(**shared, **absolute))
        else:
            raise ValueError(f"kind must be qwen3, llama or gpt2, not {kind!r}")
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Path(folder)


def make_tiny_scorer(folder: str | Path, kind: str = "qwen3", seed: int = 1) -> Path:
    """As `make_tiny_model`, with a head of one label instead of the language model's: a reward model."""
    make_tiny_model(folder, kind, seed=seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = AutoConfig.from_pretrained(folder, num_labels=1)
        AutoModelForSequenceClassification.from_pretrained(folder, config=config).save_pretrained(folder)
    return Path(folder)
