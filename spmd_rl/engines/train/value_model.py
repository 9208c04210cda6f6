"""A transformer with one number per token for a head: the critic, and the reward model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from spmd_rl.config.errors import UserError
from spmd_rl.engines.train.attention import ATTENTION, PackedTree
from spmd_rl.engines.train.model import PackedModel, load_config, load_model, probe, read_model, verify_packed
from spmd_rl.engines.train.packing import Packed


class ValueModel(PackedModel):
    """Packed tokens in; the head's number at the token before each response token out, float32 [R].

    model: the transformer without a language-model head; head: from its hidden size to 1, computed in float32.
    """

    def __init__(self, model: PreTrainedModel, head: nn.Linear) -> None:
        super().__init__()
        self.model, self.head = model, head.float()

    def full_precision(self) -> tuple[nn.Module, ...]:
        return (self.head,)

    def forward(self, packed: Packed, tree: PackedTree) -> tuple[Tensor]:
        device = self.model.device
        hidden_TH = self.model(
            input_ids=packed.input_ids_T.to(device)[None],
            position_ids=packed.position_ids_T.to(device)[None],
            use_cache=False,
            packed_tree=tree,
        ).last_hidden_state[0]
        value_T = self.head(hidden_TH.float())[:, 0]
        return (value_T.index_select(0, packed.predict_R.to(device)),)


def is_scorer(config: Any) -> bool:
    """Whether the folder of this configuration holds a model with a classification head, as reward models have."""
    return any(name.endswith("ForSequenceClassification") for name in config.architectures or ())


def load_value_model(path: str, dtype: torch.dtype, key: str, verify: bool = True) -> ValueModel:
    """The model in `path` on the CPU, transformer weights of `dtype`.

    A reward model keeps its head. The head that replaces a causal model's starts at 0, so that the first advantages
    are those of the rewards alone. verify: compare packed values with those of each sample alone first.
    Raises UserError, naming `key`, for a folder that cannot be used.
    """
    config = load_config(path, key)
    if not is_scorer(config):
        model = load_model(path, dtype, verify, key).base_model
        head = nn.Linear(config.get_text_config().hidden_size, 1)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        return ValueModel(model, head)
    if config.num_labels != 1:
        raise UserError(f"{key}: the model in {path!r} has {config.num_labels} labels; one (a reward) is wanted")
    whole = read_model(AutoModelForSequenceClassification, "a reward model", path, dtype, key)
    if not isinstance(getattr(whole, "score", None), nn.Linear):
        raise UserError(f"{key}: {config.model_type} models score by more than one linear layer: not supported")
    network = ValueModel(whole.base_model, whole.score)
    own_R = _own_values(network) if verify else None
    whole.set_attn_implementation(ATTENTION)
    if own_R is not None:
        verify_packed(network, own_R, "values", key)
    return network


@torch.no_grad()
def _own_values(network: ValueModel) -> Tensor:
    """Before each of the probe's response tokens, each sample alone, by the transformer's own forward call."""
    batch = probe(network.model.config.get_text_config().vocab_size)
    rows = []
    for prompt, response in zip(batch["prompt"].rows(), batch["response"].rows(), strict=True):
        ids = torch.cat([prompt, response]).long()
        hidden_TH = network.model(ids[None], use_cache=False).last_hidden_state[0, len(prompt) - 1 : -1]
        rows.append(network.head(hidden_TH.float())[:, 0])
    return torch.cat(rows)
