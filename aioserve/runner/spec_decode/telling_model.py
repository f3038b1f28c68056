"""A served model that tells the hidden states of all its tokens, for an MTP layer.

Any model in two halves can be told so. Knows the halves of models; knows nothing about drafts.
"""

import torch
from torch import Tensor

from aioserve.runner.attention.backend import LayerAttention, ModelInputs
from aioserve.runner.low_rank import TokenAdapters
from aioserve.runner.served_model import Halves, ServedModel, Taps


class TellingModel(ServedModel, Halves):
    """The same model: `taps` are told what its head is given, for all tokens of each step."""

    def __init__(self, model: ServedModel, halves: Halves, taps: Taps) -> None:
        """`halves` are the two parts of `model`, between which `taps` are told."""
        self._halves, self.taps = halves, taps
        self.name, self.num_parameters = model.name, model.num_parameters
        self.kv_cache_spec, self.attention_calls = model.kv_cache_spec, model.attention_calls
        self.is_compiled, self.reads_rows = model.is_compiled, model.reads_rows
        self.states, self.embedding = model.states, model.embedding
        self.adapter_sites, self.image_encoder = model.adapter_sites, model.image_encoder

    def forward(self, inputs: ModelInputs, attention: LayerAttention) -> Tensor:
        return self.logits(self.hidden(inputs, attention), inputs.logits_adapters)

    @property
    def halves(self) -> Halves:
        return self

    def hidden(self, inputs: ModelInputs, attention: LayerAttention) -> Tensor:
        every = torch.arange(len(inputs.input_ids), device=inputs.input_ids.device)
        whole = inputs._replace(logits_rows=every, logits_adapters=inputs.adapters)
        states = self._halves.hidden(whole, attention)
        self.taps.keep(inputs.slots, states[None])
        return states[inputs.logits_rows]

    def logits(self, hidden: Tensor, adapters: TokenAdapters | None = None) -> Tensor:
        return self._halves.logits(hidden, adapters)
