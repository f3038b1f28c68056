"""Multi-token prediction (MTP) layers: where checkpoints keep them, and what such a layer computes.

DeepSeek-V3 (arXiv 2412.19437, section 2.2): the normalized embedding of the next token, beside the
normalized last hidden state of the token before, is projected to one state; a decoder layer of the
family and a norm of its own follow; embedding and head are the model's. For the tokens after, the
layer's output takes the place of the model's hidden state, as in SGLang. Knows weights and
attention; knows nothing about requests.
"""

import copy
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError, one_line
from aioserve.features.spec_decode.model_drafter import Draft, DraftHead, DraftSource, draft_of_head
from aioserve.model_source.info import ModelInfo
from aioserve.runner.adapters import TokenAdapters
from aioserve.runner.attention.backend import LayerAttention, ModelInputs
from aioserve.runner.attention.bridge import (
    ATTN_IMPLEMENTATION,
    AttentionProbe,
    PagedAttentionHandler,
    serving,
)
from aioserve.runner.batch.drafter import DraftPlace
from aioserve.runner.loader import quiet_transformers
from aioserve.runner.models.long_rope import with_factors_chosen
from aioserve.runner.ranks import Ranks
from aioserve.runner.served_model import Halves, ServedModel, Taps

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
        """Return those of `names` in the first MTP layer, by name in a model of that layer."""
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
    """Return the `transformers` configuration of a model that has nothing but the MTP layer."""
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
    """Return the decoder of a `one_layer_config`, its embedding and head not those of the
    checkpoint. Raises `ConfigError` if `weights` are not its own.
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
    """Return a norm of the same kind with this `weight`."""
    own = copy.deepcopy(norm)
    own.weight = nn.Parameter(weight, requires_grad=False)
    return own


# A served model that tells the hidden states of all its tokens, for an MTP layer. Any model in two
# halves can be told so. Knows the halves of models; knows nothing about drafts.


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


# The head of a model that ranks share by tokens, put together on the first one, which drafts. Each
# rank has it laid out in its own way; what it gives for unit vectors is the weight, to the bit.


_PIECE = 256  # columns of the weight at a time
_TOLERANCE = 1e-2  # of logits that the weight gives, as a share of their size: roundings


def whole_head(halves: Halves, dtype: torch.dtype, hidden_size: int, ranks: Ranks) -> Tensor | None:
    """Return the weight [V, hidden] on the first rank, in `dtype`; None on the others, and if the
    head of `halves` does anything but multiply with it. To be called by all ranks.
    """
    columns = []
    for begin in range(0, hidden_size, _PIECE):
        unit = torch.eye(hidden_size, dtype=dtype)[begin : begin + _PIECE]
        logits = halves.logits(unit)
        if ranks.is_first:
            columns.append(logits.to(dtype))
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(4, hidden_size, generator=generator).to(dtype)
    expected = halves.logits(rows)
    if not ranks.is_first:
        return None
    weight = torch.cat(columns).T.contiguous()
    error = (rows.float() @ weight.float().T - expected).norm()
    return weight if error <= _TOLERANCE * expected.norm() else None


# The MTP layer of a served model: found in the model's own checkpoint, and loaded beside it. Knows
# names of weights and settings.


logger = logging.getLogger(__name__)


class MtpSource(DraftSource):
    """The first MTP layer of a checkpoint; of several the others are not read."""

    has_files = False  # they are those of the model

    def __init__(self, config: EngineConfig, info: ModelInfo) -> None:
        """Raises `ConfigError` if there is no such layer."""
        super().__init__(info)
        self.num_states = info.hidden_size
        num_layers = info.hf_config.num_hidden_layers
        with info.source.open_weights() as weights:
            found = [(layout, layout.weights(weights, num_layers)) for layout in LAYOUTS]
        self._layout, self._names = next(
            ((layout, names) for layout, names in found if names), (LAYOUTS[0], {})
        )
        if not self._names:
            names = " or ".join(
                layout.prefix.format(n=num_layers) + layout.projection for layout in LAYOUTS
            )
            raise ConfigError(
                f"speculation.speculative_method is {config.speculation.speculative_method}, but "
                f"{info.source.path} has no MTP layer (no {names}): take ngram, or a draft model"
            )
        if type(info.hf_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ConfigError(
                f"{info.source.path} has an MTP layer of a family that is not in transformers: "
                "take ngram, or a draft model"
            )
        self._hf_config = one_layer_config(with_factors_chosen(info.hf_config, info.max_model_len))
        self._head: Tensor | None = None  # of several ranks, which share it by tokens: all of it

    @property
    def hf_config(self) -> object:
        return self._hf_config

    @torch.inference_mode()
    def meet(self, target: ServedModel, ranks: Ranks) -> None:
        if not ranks.least(target.halves is not None):
            return  # told when it is loaded
        assert target.halves is not None, "so all ranks say"
        head = whole_head(target.halves, target.kv_cache_spec.dtype, self.num_states, ranks)
        with ranks.together():
            if ranks.is_first and head is None:
                raise ConfigError(f"the head of {target.name} does more than multiply, and ranks "
                                  "share it: leave speculation.speculative_method out")  # fmt: skip
        self._head = head

    def follow(self, target: ServedModel) -> ServedModel:
        assert target.halves is not None, "the first rank has them"
        return TellingModel(target, target.halves, Taps(()))

    @torch.inference_mode()
    def load(self, target: ServedModel, target_info: ModelInfo, place: DraftPlace) -> Draft:
        halves, embedding = target.halves, target.embedding
        if halves is None or embedding is None:
            raise ConfigError(
                f"{target.name}, does not tell of its hidden states, which an MTP layer needs: "
                "leave speculation.speculative_method out, or take ngram"
            )
        layout, path = self._layout, self.info.source.path
        if len(self._names.keys() & layout) < 3:
            raise ConfigError(f"the MTP layer in {path} lacks one of its norms")
        with self.info.source.open_weights() as stored, quiet_transformers():
            weights = {own: stored[name]() for own, name in self._names.items()}
            dtype = target.kv_cache_spec.dtype
            parts = {name: weights.pop(name).to(place.device, dtype) for name in layout[1:4]}
            size = target_info.hidden_size
            for name, part in parts.items():
                shape = [size, 2 * size] if name == layout.projection else [size]
                if list(part.shape) != shape:
                    raise ConfigError(
                        f"the MTP layer in {path} has a {name} of {list(part.shape)}, not {shape}"
                    )
            try:
                body = load_body(self._hf_config, weights, dtype).to(place.device)
            except ConfigError as error:
                raise ConfigError(f"{path}: {error}") from None
        place.keep_latents(body)
        telling = TellingModel(target, halves, Taps(()))
        logits = halves.logits if self._head is None else place.linear(self._head)
        head = MtpHead(body, layout, parts, embedding, logits)
        logger.info("drafts by its MTP layer, %.1fM parameters", head.num_parameters / 1e6)
        return draft_of_head(self.info, head, telling.taps, telling)
