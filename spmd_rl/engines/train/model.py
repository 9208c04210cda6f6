"""The model to train, from a folder in Hugging Face format, and the check that it can be computed packed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from spmd_rl.config.errors import UserError
from spmd_rl.data.batch import Batch, Column
from spmd_rl.engines.train.attention import ATTENTION, PackedTree
from spmd_rl.engines.train.logprobs import token_logprobs
from spmd_rl.engines.train.packing import Packed, pack

PROBE_TOLERANCE = 1e-3  # nats; float32 rounding stays below 1e-4, a wrong mask or position far above


class PackedModel(nn.Module):
    """A network around a transformer `model` that is computed on packed tokens: `forward(packed, tree)` -> tensors [R].

    Where the model is sharded, this is the root module, whose forward call gathers what lies outside of the layers.
    """

    model: PreTrainedModel

    def full_precision(self) -> tuple[nn.Module, ...]:
        """Modules that compute in float32 whatever the compute dtype is."""
        return ()


class PolicyModel(PackedModel):
    """Wraps a causal language model: packed tokens in, log-probabilities and entropies of the response tokens out.

    The model's own head is not called: its weight goes into the chunked log-probability, so that no
    [tokens, vocabulary] tensor is made.
    """

    def __init__(self, model: PreTrainedModel, temperature: float, chunk: int) -> None:
        super().__init__()
        self.model = model
        self.temperature, self.chunk = temperature, chunk

    def forward(self, packed: Packed, tree: PackedTree) -> tuple[Tensor, Tensor]:
        """float32 [R], float32 [R]."""
        device = self.model.device
        hidden_TH = self.model.base_model(
            input_ids=packed.input_ids_T.to(device)[None],
            position_ids=packed.position_ids_T.to(device)[None],
            use_cache=False,
            packed_tree=tree,
        ).last_hidden_state[0]
        head = self.model.get_output_embeddings()
        # The first token of all responses to a prompt is predicted by one hidden state: its logits are made once.
        predict_U, row_R = packed.predict_R.unique(return_inverse=True)
        return token_logprobs(
            hidden_TH.index_select(0, predict_U.to(device)),
            head.weight,
            packed.target_R.to(device),
            row_R.to(device),
            temperature=self.temperature,
            bias_V=getattr(head, "bias", None),
            chunk=self.chunk,
        )


def load_config(path: str, key: str = "model.path") -> Any:
    """The model's configuration. Raises UserError, naming `key`, where `path` has no readable config.json."""
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"{key}: there is no folder {path!r}; give one in Hugging Face format")
    if not (folder / "config.json").is_file():
        raise UserError(f"{key}: {path!r} has no config.json; give a folder in Hugging Face format")
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, json.JSONDecodeError, StrictDataclassError) as error:
        raise UserError(f"{key}: {path!r} has an unusable config.json: {_first_line(error)}") from error


def load_tokenizer(path: str, key: str = "model.path") -> Any:
    """The tokenizer beside the model. Raises UserError where there is none."""
    load_config(path, key)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{key}: {path!r} has no usable tokenizer: {_first_line(error)}") from error
    if not len(tokenizer):  # what transformers makes up where there is no file of one
        raise UserError(f"model.path: {path!r} has no tokenizer: save it there with save_pretrained")
    return tokenizer


def load_model(path: str, dtype: torch.dtype, verify: bool = True, key: str = "model.path") -> PreTrainedModel:
    """The causal language model in `path`, weights of `dtype` on the CPU, in evaluation mode, with packed attention.

    verify: compare packed log-probabilities with the model's own first. Raises UserError where the folder has no
    usable weights, or where the architecture cannot be computed packed. key: where the configuration names `path`.
    """
    model = read_model(AutoModelForCausalLM, "a causal language model", path, dtype, key)
    own_R = _own_logprobs(model) if verify else None
    model.set_attn_implementation(ATTENTION)
    if own_R is not None:
        verify_packed(PolicyModel(model, temperature=1.0, chunk=1024), own_R, "log-probabilities", key)
    return model


def read_model(auto: Any, kind: str, path: str, dtype: torch.dtype, key: str) -> PreTrainedModel:
    """What `auto`, a class of transformers, reads from `path`: weights of `dtype`, evaluation mode, eager attention.

    kind: what is wanted, for messages. Raises UserError as `load_model` does.
    """
    config = load_config(path, key)
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"{key}: {path!r} is an encoder-decoder model ({config.model_type}); a causal one is wanted")
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # one per rank otherwise
    try:
        model, report = auto.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise UserError(f"{key}: cannot load {kind} from {path!r}: {_first_line(error)}") from error
    finally:
        if bars:
            logging.enable_progress_bar()
    if missing := sorted(report["missing_keys"]):  # transformers would go on with random numbers
        raise UserError(f"{key}: {path!r} lacks the weight {missing[0]} ({len(missing)} in all)")
    # Dropout would make the new policy differ from the old one before any update.
    model.eval()
    if not getattr(model, "_supports_attention_backend", False):
        raise UserError(f"{key}: {config.model_type} models choose their attention themselves: not supported")
    return model


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The stack of equal layers: what is sharded and recomputed as a unit. Raises UserError where there is none."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UserError(f"{model.config.model_type} models have no list of {count} decoder layers: not supported")


def probe(vocabulary: int) -> Batch:
    """Two prompts, of which the first has three responses; tokens far apart in the vocabulary."""
    ids = torch.tensor([[0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 0]])
    generator = torch.Generator().manual_seed(0)
    first, second, *responses = (
        torch.randint(vocabulary, (n,), generator=generator, dtype=torch.int32) for n in (5, 3, 4, 2, 4, 3)
    )
    return Batch(
        ids,
        {"prompt": Column.from_rows([first, first, first, second]), "response": Column.from_rows(list(responses))},
    )


@torch.no_grad()
def _own_logprobs(model: PreTrainedModel) -> Tensor:
    """Of the probe's response tokens, each sample alone, by the model's own forward call and head."""
    batch = probe(model.config.get_text_config().vocab_size)
    rows = []
    for prompt, response in zip(batch["prompt"].rows(), batch["response"].rows(), strict=True):
        ids = torch.cat([prompt, response]).long()
        logprobs = F.log_softmax(model(ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1].float(), dim=-1)
        rows.append(logprobs.gather(1, response.long()[:, None])[:, 0])
    return torch.cat(rows)


@torch.no_grad()
def verify_packed(network: PackedModel, own_R: Tensor, what: str, key: str) -> None:
    """Raises UserError where the network's outputs for the packed probe are not `own_R`, those of each sample alone.

    This finds what no list of architectures can: layers that carry state across the border of two samples, position
    schemes that ignore `position_ids`, logits that are scaled or capped behind the head. what: is compared.
    """
    model = network.model
    batch = probe(model.config.get_text_config().vocab_size)
    tolerance = (PROBE_TOLERANCE if model.dtype == torch.float32 else 0.1) * max(1.0, float(own_R.abs().max()) / 10)
    for shared in (False, True):
        packed = pack(batch, shared, min_shared=1)
        worst = float((network(packed, PackedTree(packed.nodes, model.device))[0] - own_R).abs().max())
        if not worst <= tolerance:
            raise UserError(
                f"{key}: {model.config.model_type} models cannot be computed packed: {what} of samples packed "
                f"together differ by {worst:.3g} from those of each alone; this architecture is not supported"
            )


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
