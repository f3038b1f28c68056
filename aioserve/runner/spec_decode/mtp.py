"""Multi-token prediction (MTP) layers: where checkpoints keep them, and what such a layer computes.

DeepSeek-V3 (arXiv 2412.19437, section 2.2): the normalized embedding of the next token, beside the
normalized last hidden state of the token before, is projected to one state; a decoder layer of the
family and a norm of its own follow; embedding and head are the model's. For the tokens after, the
layer's output takes the place of the model's hidden state, as in SGLang. Knows weights and
attention; knows nothing about requests.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from aioserve.errors import ConfigError, one_line
from aioserve.runner.attention.backend import LayerAttention
from aioserve.runner.attention.bridge import (
    ATTN_IMPLEMENTATION,
    AttentionProbe,
    PagedAttentionHandler,
    serving,
)
from aioserve.runner.spec_decode.draft_head import DraftHead

_PROBE_TOKENS = 4
_TINY = 8  # tokens of the embedding and head that the layer's module has and does not use


class MtpLayout(NamedTuple):
    """The names of one MTP layer's weights, behind `prefix`."""

    prefix: str  # `{n}` stands for the number of the model's own layers
    token_norm: str
    hidden_norm: str
    projection: str  # of the token's part beside the hidden state's
    norm: str
    layer: str = ""  # prefix of the decoder layer's names
    shared: tuple[str, ...] = ()  # copies of the model's embedding and head, which are not read

    def weights(self, names: Iterable[str], num_layers: int) -> dict[str, str]:
        """Of `names` those of the first MTP layer, by what they are in a model of that layer."""
        prefix = self.prefix.format(n=num_layers)
        found = {}
        for name in names:
            own = name.removeprefix(prefix)
            if own == name or own in self.shared or own.endswith("rotary_emb.inv_freq"):
                continue
            if own in (self.token_norm, self.hidden_norm, self.projection):
                found[own] = name
            elif own == self.norm:
                found["model.norm.weight"] = name
            elif own.startswith(self.layer) or not own.startswith("layers."):
                # what is of no further MTP layer, and unknown, is refused as a part of this one
                found["model.layers.0." + own.removeprefix(self.layer)] = name
        return found if self.projection in found else {}


LAYOUTS = (
    # DeepSeek-V3, GLM-4.5 to 4.7
    MtpLayout(
        "model.layers.{n}.",
        *("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"),
        shared=("embed_tokens.weight", "shared_head.head.weight"),
    ),
    # Qwen3-Next, Qwen3.5
    MtpLayout(
        "mtp.",
        *("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "fc.weight", "norm.weight"),
        layer="layers.0.",
    ),
)


def one_layer_config(config: Any) -> Any:
    """The `transformers` configuration of a model that has nothing but the MTP layer."""
    own = copy.deepcopy(config)
    vars(own).pop("quantization_config", None)
    own.num_hidden_layers = 1
    own.vocab_size, own.pad_token_id, own.tie_word_embeddings = _TINY, None, False
    for name, usual in (("layer_types", "full_attention"), ("mlp_layer_types", "sparse")):
        if getattr(own, name, None) is not None:
            setattr(own, name, (getattr(own, f"mtp_{name}", None) or [usual])[:1])
    if hasattr(own, "first_k_dense_replace"):  # layers below have no experts
        own.first_k_dense_replace = 0
    return own


def load_body(config: Any, weights: Mapping[str, Tensor], dtype: torch.dtype) -> nn.Module:
    """The decoder of a `one_layer_config`, its embedding and head not those of the checkpoint.
    Raises `ConfigError` if `weights` are not its own.
    """
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    try:
        module, report = kind.from_pretrained(
            None,
            config=config,
            state_dict=dict(weights),
            dtype=dtype,
            attn_implementation=ATTN_IMPLEMENTATION,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except Exception as error:  # transformers raises whatever the weights provoke
        raise ConfigError(f"its MTP layer cannot be loaded: {one_line(error)}") from error
    outer = {id(module.get_input_embeddings()), id(module.get_output_embeddings())}
    unused = {f"{name}.weight" for name, part in module.named_modules() if id(part) in outer}
    wrong = {
        "is missing": set(report["missing_keys"]) - unused,
        "is not known": set(report["unexpected_keys"]),
        "has another shape": {key[0] for key in report["mismatched_keys"]} - unused,
    }
    for what, names in wrong.items():
        if names:
            raise ConfigError(f"its MTP layer cannot be loaded: {min(names)} {what}")
    body: nn.Module = module.base_model.eval()
    return body


class MtpHead(DraftHead):
    """One MTP layer on the embedding and head of the model that it is for."""

    def __init__(
        self,
        body: nn.Module,
        layout: MtpLayout,
        weights: Mapping[str, Tensor],
        embedding: Callable[[Tensor], Tensor],
        logits: Callable[[Tensor], Tensor],
    ) -> None:
        """`body`: as `load_body` returns it. `weights`: those that `layout` names beside it, on the
        device and in the type of `body`.
        """
        norm = body.norm
        assert isinstance(norm, nn.Module), "a decoder's last norm"
        self._body, self._embedding, self._logits = body, embedding, logits
        self._project = weights[layout.projection]
        self._token_norm = _like(norm, weights[layout.token_norm])
        self._hidden_norm = _like(norm, weights[layout.hidden_norm])
        self.device, dtype = self._project.device, self._project.dtype
        self.state_size = len(self._project)
        probe = AttentionProbe()
        with serving(probe):
            states = torch.zeros(_PROBE_TOKENS, self.state_size, dtype=dtype, device=self.device)
            self._run(states, torch.arange(_PROBE_TOKENS, device=self.device))
        self._sites = probe.sites
        self.kv_cache_spec, self.attention_calls = probe.spec(dtype), tuple(probe.calls)
        of_body = sum(p.numel() for name, p in body.named_parameters() if "embed" not in name)
        self.num_parameters = of_body + sum(weight.numel() for weight in weights.values())

    def combine(self, states: Tensor) -> Tensor:
        return states

    def forward(
        self, token_ids: Tensor, positions: Tensor, states: Tensor, attention: LayerAttention
    ) -> Tensor:
        tokens, seen = self._token_norm(self._embedding(token_ids)), self._hidden_norm(states)
        x = F.linear(torch.cat((tokens, seen), dim=-1), self._project)
        with serving(PagedAttentionHandler(self._sites, attention)):
            return self._run(x, positions)

    def logits(self, states: Tensor) -> Tensor:
        return self._logits(states)

    def _run(self, x: Tensor, positions: Tensor) -> Tensor:
        out = self._body(inputs_embeds=x[None], position_ids=positions[None], use_cache=False)
        states: Tensor = out.last_hidden_state[0]
        return states


def _like(norm: nn.Module, weight: Tensor) -> nn.Module:
    """A norm of the same kind with this `weight`."""
    own = copy.deepcopy(norm)
    own.weight = nn.Parameter(weight, requires_grad=False)
    return own
