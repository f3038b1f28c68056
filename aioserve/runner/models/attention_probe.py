"""Which attention layers a module of `transformers` has: a few tokens are computed to see them.

Then what enters some of these layers, told by hooks, for an EAGLE-3 head. Knows modules and what
the attention bridge records; knows nothing about how weights are loaded.
"""

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from aioserve.errors import one_line
from aioserve.model_source.info import ModelInfo
from aioserve.runner.attention.bridge import (
    ATTN_IMPLEMENTATION,
    AttentionProbe,
    NotADecoderError,
    UnsupportedModelError,
    serving,
)
from aioserve.runner.served_model import Taps
from aioserve.support.progress import counted

#: More than one token, so that a model that builds masks of its own shows them.
PROBE_TOKENS = 4


def probe_attention(module: nn.Module, info: ModelInfo, *, has_states: bool) -> AttentionProbe:
    """Run a few tokens to see which attention layers there are; config fields differ by model."""
    if getattr(module.config, "_attn_implementation", None) != ATTN_IMPLEMENTATION:
        raise UnsupportedModelError("it does not use the attention interface of transformers")
    ids, positions = probe_inputs(module, info)
    takes_positions = takes(module, "position_ids")
    num_layers = info.hf_config.num_hidden_layers
    shown = _layers_shown(module, num_layers, 2 if takes_positions else 1)
    with torch.inference_mode(), shown:
        default = probe = _record_attention(module, input_ids=ids)
        if takes_positions:
            probe = _record_attention(module, input_ids=ids, position_ids=positions)
        elif probe.modules or not has_states:
            raise UnsupportedModelError("it does not take the positions of its tokens")
    if len(probe.modules) != num_layers and not has_states:
        raise UnsupportedModelError(
            f"{len(probe.modules)} of its {num_layers} layers use the attention interface"
        )
    if not all(map(_same, probe.queries, default.queries)):
        raise NotADecoderError("its positions do not count from 0")
    num_chunked = sum(site.chunk is not None for site in probe.sites.values())
    layer_types = getattr(info.hf_config, "layer_types", None) or []
    if layer_types.count("chunked_attention") != num_chunked:
        raise UnsupportedModelError("its attention in chunks is only in its mask")
    has_window = any(call.options.sliding_window for call in probe.calls)
    if not has_window and _masks_a_window(module, info):
        raise UnsupportedModelError(
            "its sliding window is only in its mask: serve it with max_model_len of at most "
            f"{info.hf_config.sliding_window}"
        )
    return probe


@contextmanager
def _layers_shown(module: nn.Module, num_layers: int, num_passes: int) -> Iterator[None]:
    """How far forward passes are; the first one reads what so far is only mapped to files."""
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    layers = next((part for part in lists if len(part) == num_layers), ())

    def note(*_: Any) -> None:  # what a hook returns would take the place of the output
        count()

    with counted(num_passes * len(layers), "Trying layers", "layer") as count, ExitStack() as hooks:
        for layer in layers:
            hooks.callback(layer.register_forward_hook(note).remove)
        yield


def probe_inputs(module: nn.Module, info: ModelInfo) -> tuple[Tensor, Tensor]:
    """Ids and positions [1, T] of a few tokens."""
    device = next(module.parameters()).device
    positions = torch.arange(PROBE_TOKENS, device=device)[None]
    return (info.vocab_size // 2 + positions) % info.vocab_size, positions  # small: maybe padding


def _same(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit, but for what is not a number."""
    return torch.equal(a.nan_to_num(), b.nan_to_num())


def _masks_a_window(module: nn.Module, info: ModelInfo) -> bool:
    """Return whether the model asks for windowed masks (which are not built) that requests would
    feel.
    """
    window = getattr(info.hf_config, "sliding_window", None)
    layer_types = getattr(info.hf_config, "layer_types", None) or ["sliding_attention"]
    return (
        window is not None
        and window < info.max_model_len
        and "sliding_attention" in layer_types
        and hasattr(sys.modules[type(module).__module__], "create_sliding_window_causal_mask")
    )


def use_default_attention(module: nn.Module) -> None:
    """Have a module compute attention as `generate` would: not all ways compute the same."""
    for part in module.modules():
        if isinstance(part, PreTrainedModel):
            part.config._attn_implementation = part.get_correct_attn_implementation(None)


def takes(module: nn.Module, argument: str) -> bool:
    """Return whether the forward pass of a module has this argument."""
    return argument in inspect.signature(module.forward).parameters


def _record_attention(module: nn.Module, **inputs: Tensor) -> AttentionProbe:
    probe = AttentionProbe()
    try:
        with serving(probe):
            module(**inputs, use_cache=False)
    except UnsupportedModelError:
        raise
    except Exception as error:  # code of any kind of model
        raise UnsupportedModelError(f"its forward pass fails: {one_line(error)}") from error
    return probe


# What enters some layers of a module of `transformers`, told by hooks, for an EAGLE-3 head. Knows
# lists of decoder layers, each of which is given the hidden states of all tokens; knows nothing
# about heads or drafts.


_NUM_TOKENS = 4


class TappedLayers:
    """Hooks on the layers that `taps` names, which note what enters them."""

    def __init__(self, layers: Sequence[nn.Module], taps: Taps) -> None:
        self.taps = taps
        self._entered: dict[int, Tensor] = {}
        self._handles = [
            layers[index].register_forward_pre_hook(self._noting(index), with_kwargs=True)
            for index in taps.layers
        ]

    @contextmanager
    def telling(self, slots: Tensor) -> Iterator[None]:
        """All layers are run in here, once, on tokens of these `slots` [T]."""
        yield
        self.taps.keep(slots, torch.stack([self._entered.pop(index) for index in self.taps.layers]))

    def are_told(self, module: nn.Module) -> bool:
        """Return whether a pass of `module` gives each of the layers one state for each token."""
        weight = next(module.parameters())
        config: Any = module.config
        inputs = {"input_ids": torch.arange(_NUM_TOKENS, device=weight.device)[None]}
        if takes(module, "position_ids"):
            inputs["position_ids"] = inputs["input_ids"]
        with serving(AttentionProbe()):
            module(**inputs, use_cache=False)
        shapes = {tuple(self._entered.pop(index).shape) for index in self.taps.layers}
        return shapes == {(_NUM_TOKENS, config.hidden_size)}

    def close(self) -> None:
        """Take the hooks away: the layers tell of their inputs no longer."""
        for handle in self._handles:
            handle.remove()

    def _noting(self, index: int) -> Any:
        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states: Tensor = args[0] if args else kwargs["hidden_states"]
            self._entered[index] = states[0].clone()  # a layer may add to it in its place

        return note


@torch.inference_mode()
def tap_layers(module: nn.Module, layers: Sequence[int]) -> TappedLayers | None:
    """Hooks on `layers` of a causal language model; None if it is not a list of such layers."""
    config: Any = module.config
    lists = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    found = [part for part in lists if len(part) == config.num_hidden_layers]
    if not found:
        return None
    tapped = TappedLayers(list(found[0]), Taps(tuple(layers)))
    try:
        are_told = tapped.are_told(module)
    except Exception:  # code of any kind of model
        are_told = False
    if not are_told:
        tapped.close()
    return tapped if are_told else None
