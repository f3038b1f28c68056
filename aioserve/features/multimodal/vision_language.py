"""The text model of one that sees, as a causal language model of its own; loading of both parts.

Knows how `transformers` names the parts of models that see; knows nothing about images.
"""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from aioserve.errors import ConfigError, one_line
from aioserve.features.multimodal.cpu_encoder_attention import use_kernels
from aioserve.features.multimodal.image_encoder import (
    ImageEncoder,
    SharedImageEncoder,
    num_deep_rows,
)
from aioserve.features.quantized import quantize_experts, quantize_linears
from aioserve.model_source.info import ModelInfo
from aioserve.model_source.source import Rounding
from aioserve.model_source.vision_families import family_of
from aioserve.runner.attention.backend import GivenRows
from aioserve.runner.attention.bridge import ATTN_IMPLEMENTATION, AttentionProbe, serving
from aioserve.runner.fused.decoder import Place
from aioserve.runner.loader import InnerModel

_IN_TEXT = re.compile(r"(?!.*\bvis(?:ion|ual))(?:\w+\.)*?(layers\.\d+\..+|embed_tokens)")


class TextPart(InnerModel):
    """Decoder and head, called as any causal language model of `transformers` is."""

    _blank: Tensor  # token ids

    def __init__(self, whole: Any, blank: Sequence[str] = ()) -> None:
        """`blank` are names in the configuration of tokens that are embedded as padding."""
        super().__init__()
        self.name = type(whole).__name__
        decoder = whole.get_decoder()
        if decoder.get_output_embeddings() is not None:  # Llama 4 tells the one around it
            decoder = decoder.model
        self.model: nn.Module = decoder
        self.lm_head: nn.Module = whole.get_output_embeddings()
        self.config: Any = self.model.config
        self._softcap: float | None = getattr(self.config, "final_logit_softcapping", None)
        ids = [getattr(whole.config, name) for name in blank]
        blanks = torch.tensor([token_id for token_id in ids if token_id is not None])
        device = next(self.lm_head.parameters()).device
        self.register_buffer("_blank", blanks.to(device), persistent=False)
        if blank:  # for callers of `base_model` as well
            self.model.register_forward_pre_hook(self._before_model, with_kwargs=True)
        # Gemma 4 E2B and E4B: each layer adds a row by token, for an image that of padding.
        self._has_layer_rows = bool(getattr(self.config, "hidden_size_per_layer_input", None))

    @property
    def tp_plan(self) -> dict[str, str]:
        """How ranks share its linear layers, in the words of `transformers`."""
        plan: dict[str, str] = self.model.tp_plan  # type: ignore[assignment]
        shared = {f"model.{name}": style for name, style in plan.items()}
        return shared | {"lm_head": "colwise_gather_output"}

    @property
    def base_model(self) -> nn.Module:
        """The text model without its head."""
        return self.model

    def get_input_embeddings(self) -> nn.Module:
        """Return the module that embeds token ids, as `transformers` asks for it."""
        found: nn.Module = self.model.get_input_embeddings()  # type: ignore[operator]
        return found

    def get_output_embeddings(self) -> nn.Module:
        """Return the language-model head, as `transformers` asks for it."""
        return self.lm_head

    @staticmethod
    def own_name(name: str) -> str:
        """Return what a module of the whole model is called in here; what sees has no other
        name.
        """
        match = _IN_TEXT.fullmatch(name)
        return name if match is None else f"model.{match[1]}"

    def given(self, input_ids: Tensor, positions: Tensor, given: GivenRows) -> dict[str, Any]:
        """Arguments of `forward` for T tokens some of whose rows are `given`."""
        embed, input_ids = self.get_input_embeddings(), self._as_read(input_ids)
        rows = embed(input_ids[None])
        rows[0, given.places] = given.rows
        arguments: dict[str, Any] = {"input_ids": None, "inputs_embeds": rows}
        if self._has_layer_rows:
            arguments["per_layer_inputs"] = self.model.get_per_layer_inputs(input_ids[None])  # type: ignore[operator]
        if given.deep:
            seen = torch.zeros_like(input_ids, dtype=torch.bool)
            seen[given.places] = True
            arguments["visual_pos_masks"] = seen[None]
            arguments["deepstack_visual_embeds"] = list(given.deep)
        if given.axes is not None:
            axes = positions.expand(3, 1, -1).clone()
            axes[:, 0, given.places] = given.axes
            arguments["position_ids"] = axes
        return arguments

    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool = False,
        logits_to_keep: Tensor | None = None,
        **of_images: Any,
    ) -> CausalLMOutputWithPast:
        """Ids [1, T] or the rows [1, T, hidden] that they stand for; logits of all, or of some.
        `of_images` are what the decoder is told besides.
        """
        hidden = self.model(
            input_ids=input_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **of_images,
        ).last_hidden_state
        keep = slice(None) if logits_to_keep is None else logits_to_keep
        logits = self.lm_head(hidden[:, keep])
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return CausalLMOutputWithPast(logits=logits)

    def _before_model(self, _: nn.Module, args: Any, arguments: dict[str, Any]) -> Any:
        if (ids := arguments.get("input_ids")) is not None:
            arguments["input_ids"] = self._as_read(ids)
        return args, arguments

    def _as_read(self, input_ids: Tensor) -> Tensor:
        if not len(self._blank):
            return input_ids
        return input_ids.masked_fill(torch.isin(input_ids, self._blank), self.config.pad_token_id)


@torch.inference_mode()
def take_text_part(whole: Any, blank: Sequence[str] = ()) -> TextPart:
    """Take it out of `whole`, which keeps what sees. Raises `ConfigError` if a text has other
    logits without the rest.
    """
    part = TextPart(whole, blank)
    ids = torch.arange(4, device=next(part.parameters()).device)[None]
    ids = ids + part.config.vocab_size // 2
    try:
        with serving(AttentionProbe()):
            expected = whole(input_ids=ids, use_cache=False).logits
        with serving(AttentionProbe()):
            found = part(input_ids=ids).logits
    except Exception as error:  # code of any kind of model
        raise ConfigError(f"unsupported architecture {part.name}: {one_line(error)}") from error
    if not torch.equal(found, expected):
        raise ConfigError(f"unsupported architecture {part.name}: more follows its head")
    gone = {id(part.model), id(part.lm_head)}
    for owner in list(whole.modules()):
        for name, child in list(owner.named_children()):
            if id(child) in gone:
                setattr(owner, name, None)
    return part


# Loads a vision model as two parts: its text model, and what sees. Knows how `transformers` makes
# such a model; what serves the text model is decided by the loader.


def load_parts(
    info: ModelInfo, dtype: torch.dtype, rounding: Rounding | None, place: Place
) -> tuple[TextPart, ImageEncoder]:
    """At `place`, the text model of the vision model of `info`, quantized as `rounding` says, and
    its image encoder, which is not. Of several ranks, the share that this one has of the text
    model; an encoder is not shared out. Raises `ConfigError`.
    """
    family, ranks = family_of(info), place.ranks
    assert family is not None, "the model sees"
    device = place.device if ranks is None else torch.device("cpu")
    whole = info.source.load_seeing_module(dtype, device, ATTN_IMPLEMENTATION)
    text = take_text_part(whole, family.blank)
    num_deep = num_deep_rows(info.whole_config)
    if num_deep >= info.hf_config.num_hidden_layers:
        raise ConfigError(
            f"{info.config.model} adds rows of images behind {num_deep} layers, and has "
            f"{info.hf_config.num_hidden_layers}"
        )
    if rounding is not None:
        quantize_linears(text, rounding)
        quantize_experts(text, rounding.inner)
    names = ("image_token_id", *(("video_token_id",) if family.videos else ()))
    token_ids = [getattr(info.whole_config, name) for name in names]
    if ranks is None:
        encoder = ImageEncoder(whole, family, token_ids, place)
    else:
        ranks.share_out(text, dtype)
        text.to(place.device)
        if ranks.is_first:
            whole.to(place.device)
        encoder = SharedImageEncoder(whole, family, token_ids, place, ranks)
    if not place.is_card:
        use_kernels(encoder)
    return text, encoder
