"""Makes of a model on disk one that can be served, by the fastest tier that can, or says why none.

Before it, what loading asks: a model of `transformers` in two halves (its head is asked by way of
the model's own code, as only that knows what becomes of its logits), which weights are quantized,
and whether weights are numbers.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as hf_logging

from aioserve.config import ModelConfig
from aioserve.errors import ConfigError, one_line
from aioserve.model_source.info import ModelInfo
from aioserve.model_source.quantized_weight import attached, has_quantized_layers, told_of_weights
from aioserve.model_source.source import NoAttentionInterfaceError, Rounding
from aioserve.model_source.vision_families import family_of
from aioserve.runner.adapters import TokenAdapters, make_hooks
from aioserve.runner.attention.backend import GivenRows, LayerAttention, ModelInputs
from aioserve.runner.attention.bridge import (
    ATTN_IMPLEMENTATION,
    AttentionProbe,
    NotADecoderError,
    PagedAttentionHandler,
    SeenTokens,
    UnsupportedModelError,
    serving,
)
from aioserve.runner.batch.input_batch import EncoderPart
from aioserve.runner.fused.decoder import Place
from aioserve.runner.fused.fuse import fuse
from aioserve.runner.fused.ops import NotFusedError
from aioserve.runner.models.architecture import check_architecture
from aioserve.runner.models.attention_probe import (
    PROBE_TOKENS,
    TappedLayers,
    probe_attention,
    probe_inputs,
    takes,
    tap_layers,
    use_default_attention,
)
from aioserve.runner.models.long_rope import set_long_factors
from aioserve.runner.models.own_products import (
    are_stored,
    keep_experts_apart,
    passed,
    unpack,
    use_own_products,
    widen_head,
)
from aioserve.runner.models.row_by_row import RowByRowModel
from aioserve.runner.ranks import together
from aioserve.runner.served_model import Halves, LayerStates, ServedModel, Taps
from aioserve.support.parts import Brought
from aioserve.support.progress import as_stage


class BodyAndHead:
    """`body` then `logits` is the whole model, if `find_body_and_head` says so."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._body: nn.Module = module.base_model  # type: ignore[assignment]
        self._output_type: Any = None  # of the body

    def hidden(self, **inputs: Tensor) -> Tensor:
        """Hidden states [T, hidden] after the last norm, for inputs [1, T]."""
        output = self._body(**inputs, use_cache=False)
        self._output_type = type(output)
        states: Tensor = output.last_hidden_state[0]
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] of rows of such states."""
        output = self._output_type(last_hidden_state=hidden[None])
        nothing = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        self._body.forward = lambda *args, **kwargs: output
        try:
            logits: Tensor = self._module(
                input_ids=nothing, position_ids=nothing, use_cache=False
            ).logits[0]
        finally:
            del self._body.forward
        return logits


@torch.inference_mode()
def find_body_and_head(module: nn.Module, **inputs: Tensor) -> BodyAndHead | None:
    """Return the two parts of `module`, shown on `inputs` [1, T]; None if it does not consist of
    them.
    """
    try:
        parts = BodyAndHead(module)
        with serving(AttentionProbe()):
            expected = module(**inputs, use_cache=False).logits[0]
        with serving(AttentionProbe()):
            hidden = parts.hidden(**inputs)
        found = parts.logits(hidden)  # calls for attention get no answer: there must be none
    except Exception:  # code of any kind of model
        return None
    return parts if torch.allclose(found, expected, equal_nan=True) else None


# Which weights are quantized as a model is loaded, and whether that is how they are multiplied.
# Knows settings, formats and modules; knows nothing about files or kernels.


logger = logging.getLogger(__name__)


def rounding_of(config: ModelConfig) -> Rounding | None:
    """Return the rounding that `model.quantization` asks for: one scale for a group of inputs."""
    if config.quantization is None:
        return None
    group = config.quantization_group_size
    outer = "Q8_0" if group == 32 else f"int8/{group}"
    if config.quantization == "int8":
        return Rounding(outer, outer)
    return Rounding("Q4_0" if group == 32 else f"int4/{group}", outer)


def check_kernels(config: ModelConfig, *, keeps_blocks: bool) -> None:
    """Raise `ConfigError` where weights are to be quantized, and nothing multiplies with such."""
    if config.quantization is not None and not keeps_blocks:
        raise ConfigError(
            f"model.quantization is {config.quantization!r}, which needs the compiled kernels of a "
            "CPU and model.fused"
        )


class QuantizedLoad(NamedTuple):
    """The quantization of a module that was loaded, before it is made a model that is served."""

    kinds: str  # of formats, in words
    num_bytes: int
    has_layers: bool

    @classmethod
    def of(cls, module: Any) -> "QuantizedLoad":
        """Return how the weights of a causal language model are quantized."""
        return cls(*told_of_weights(module), has_quantized_layers(module))

    def check(self, model: ServedModel, config: ModelConfig) -> None:
        """Say of `model`, which the module became, how its weights are multiplied. Raises
        `ConfigError` if layers were to be quantized and are not multiplied so.
        """
        if config.quantization is not None and not (self.has_layers and model.is_stored):
            raise ConfigError(
                f"model.quantization is {config.quantization!r}, but the compiled kernels do not "
                f"multiply with quantized layers of {model.name}: leave it out"
            )
        if self.kinds:
            logger.info(
                "%s: %.0f MB of weights, %s, %s",
                model.name,
                self.num_bytes / 1e6,
                self.kinds,
                "multiplied as they are stored"
                if model.is_stored
                else f"unpacked to {config.dtype}",
            )


# Looks for numbers among weights that are none, and says in which tensors they are. One pass over
# the weights: 8 ms for the 135M parameters of SmolLM2 in bfloat16, of 0.8 s that it takes to load
# them. Knows parameters; knows nothing about files.


NUM_NAMED = 3  # tensors in the log line


@torch.inference_mode()
def warn_of_unsound(module: nn.Module) -> list[str]:
    """Return names of the parameters of `module` that hold NaN or infinity; the log is told of
    them.
    """
    parameters = dict(module.named_parameters())
    found = [name for name, parameter in parameters.items() if not _is_sound(parameter)]
    if found:
        named = ", ".join(found[:NUM_NAMED]) + (", ..." if len(found) > NUM_NAMED else "")
        logger.warning(
            "%d of the %d weights of %s hold NaN or infinity: %s. Requests that meet them fail; "
            "the files of the model may be damaged",
            len(found),
            len(parameters),
            type(module).__name__,
            named,
        )
    return found


def _is_sound(parameter: Tensor) -> bool:
    """Return whether all of its numbers are finite; quantized weights are not looked at."""
    if not parameter.is_floating_point() or parameter.is_meta or not parameter.numel():
        return True
    if parameter.itemsize < 2 or attached(parameter) is not None:
        return True
    least, most = torch.aminmax(parameter)  # NaN if there is any
    return bool(least.isfinite() & most.isfinite())


# Makes of a model on disk one that can be served, by the fastest tier that can, or says why none.
# Knows `transformers`; knows nothing about file formats, blocks, batches or requests.


class InnerModel(nn.Module):
    """The text model of a larger one, called as any causal language model of `transformers` is."""

    name: str  # of the larger one

    def given(self, ids: Tensor, positions: Tensor, given: GivenRows) -> dict[str, Any]:
        """Return the arguments of a pass over tokens [T], some of which enter as rows."""
        raise NotImplementedError


#: What parts bring to load a model: `states` finds the layers that have some, `text and encoder`
#: loads a model that sees in two parts.
MODEL_PARTS = Brought[Any]("parts of models")


class AnyModel(ServedModel, Halves):
    """Modules of `transformers`, unchanged; their attention calls reach the backend."""

    def __init__(
        self,
        module: nn.Module,
        probe: AttentionProbe,
        dtype: torch.dtype,
        states: LayerStates | None = None,
        encoder: EncoderPart | None = None,
    ) -> None:
        self.module, self.embedding = module, module.get_input_embeddings()  # type: ignore[operator]
        self.states = states
        self.name = module.name if isinstance(module, InnerModel) else type(module).__name__
        self.num_parameters = sum(parameter.numel() for parameter in module.parameters())
        if encoder is not None:
            self.num_parameters += encoder.num_parameters
        self.image_encoder = encoder
        self.kv_cache_spec = probe.spec(dtype)
        self.attention_calls = tuple(probe.calls)
        self._sites = probe.sites
        # Llama 4 scales the queries of some layers by how many tokens its cache has seen
        self._scales_queries = any(
            getattr(part, "attn_temperature_tuning", False) for part in probe.sites
        )
        self._takes_logits_to_keep = takes(module, "logits_to_keep")  # else it gives all of them
        self._takes_positions = takes(module, "position_ids")
        self._parts: BodyAndHead | None = None
        self._adapters = make_hooks(module)
        self._tapped: TappedLayers | None = None

    def tap(self, layers: Sequence[int]) -> Taps | None:
        self._tapped = tap_layers(self.module, layers)
        return None if self._tapped is None else self._tapped.taps

    def take_apart(self, info: ModelInfo) -> None:
        """Find out whether there are `halves`, and what can have adapters."""
        ids, positions = probe_inputs(self.module, info)
        with self._adapters.finding(PROBE_TOKENS, self.states):
            self._parts = find_body_and_head(self.module, input_ids=ids, position_ids=positions)
        head = self.module.get_output_embeddings()  # type: ignore[operator]
        # `forward`, as a step on another thread may have adapters on it just now
        self.adapter_sites = self._adapters.sites(head.forward)

    def forward(self, inputs: ModelInputs, attention: LayerAttention) -> Tensor:
        keep = inputs.logits_rows
        tokens = inputs.adapters
        sampling = inputs.logits_adapters if self._takes_logits_to_keep else tokens
        handler = PagedAttentionHandler(self._sites, attention)
        with serving(handler), self._adapters.used(tokens, sampling), self._passing(inputs):
            arguments = self._arguments(inputs) | {"use_cache": False}
            if self._takes_logits_to_keep:
                arguments["logits_to_keep"] = keep
            logits: Tensor = self.module(**arguments).logits[0]
        return logits if self._takes_logits_to_keep else logits[keep]

    @property
    def halves(self) -> Halves | None:
        return None if self._parts is None else self

    def hidden(self, inputs: ModelInputs, attention: LayerAttention) -> Tensor:
        assert self._parts is not None, "asked for its halves"
        handler = PagedAttentionHandler(self._sites, attention)
        with serving(handler), self._adapters.used(inputs.adapters, None), self._passing(inputs):
            hidden = self._parts.hidden(**self._arguments(inputs))
        return hidden[inputs.logits_rows]

    def _arguments(self, inputs: ModelInputs) -> dict[str, Any]:
        arguments: dict[str, Any] = {"input_ids": inputs.input_ids[None]}
        if self._takes_positions:
            arguments["position_ids"] = inputs.positions[None]
        if inputs.given is not None:
            assert isinstance(self.module, InnerModel), "rows of images are for these"
            arguments |= self.module.given(inputs.input_ids, inputs.positions, inputs.given)
        if self._scales_queries:
            arguments["past_key_values"] = SeenTokens(inputs.positions)
        return arguments

    def logits(self, hidden: Tensor, adapters: TokenAdapters | None = None) -> Tensor:
        assert self._parts is not None, "asked for its halves"
        with self._adapters.used(None, adapters):
            return self._parts.logits(hidden)

    @contextmanager
    def _passing(self, inputs: ModelInputs) -> Iterator[None]:
        """All layers are run in here, once."""
        with ExitStack() as stack:
            if self.states is not None:
                stack.enter_context(self.states.used(inputs.states))
            if self._tapped is not None:
                stack.enter_context(self._tapped.telling(inputs.slots))
            yield


def load_model(
    config: ModelConfig, info: ModelInfo, place: Place, *, num_seen: int = 0
) -> ServedModel:
    """Load the weights of `info.source`, for the fast tier if `config` and the model allow it; of a
    model that sees all of it, if up to `num_seen` tokens of a step may be of images.

    What dtype "auto" means is known to the side that `place` is on, which has put it in. Raises
    `ConfigError` in one line if a file is missing or damaged, or if the architecture needs more
    than causal attention over tokens.
    """
    check_architecture(info)
    keeps_blocks = config.fused and place.multiplies_blocks
    check_kernels(config, keeps_blocks=keeps_blocks)
    num_weight_bytes(config, info, place)  # names a damaged file; `from_pretrained` would not
    rounding = rounding_of(config)
    if num_seen:
        with quiet_transformers(), together(place.ranks):
            text, encoder = MODEL_PARTS["text and encoder"](
                info, named_dtype(config.dtype), rounding, place
            )
        num_mrope = num_seen if encoder.has_axes else 0
        quantized = QuantizedLoad.of(text)
        model = prepare_model(text, config, info, place, encoder, num_mrope)
        quantized.check(model, config)
        return model
    if type(info.whole_config) not in MODEL_FOR_CAUSAL_LM_MAPPING and family_of(info) is not None:
        raise ConfigError(
            f"{info.config.model} is a vision model: it is served from unquantized files alone, "
            "and not as a draft model"
        )
    is_converted = place.ranks is None or rounding is not None or info.source.is_quantized
    load = partial(
        info.source.load_module,
        # Ranks keep a share: what is stored in another type, or goes to a card, is converted and
        # goes when the rest is gone.
        named_dtype(config.dtype) if is_converted else "auto",
        place.device if place.ranks is None else torch.device("cpu"),
        keeps_blocks=keeps_blocks,
        rounding=rounding,
    )
    with quiet_transformers(), together(place.ranks):
        if place.ranks is not None and keeps_blocks and info.source.is_quantized:
            place.ranks.check_groups(info)
        try:
            module = load(ATTN_IMPLEMENTATION)
        except NoAttentionInterfaceError:
            module = load(None)
        if place.ranks is not None:
            place.ranks.share_out(module, named_dtype(config.dtype))
            module.to(place.device)
    if rounding is not None:
        # What could not be read weight by weight, as `transformers` puts it together of several.
        info.source.quantize(module, rounding)
    quantized = QuantizedLoad.of(module)
    model = prepare_model(module, config, info, place)
    quantized.check(model, config)
    return model


def prepare_model(
    module: nn.Module,
    config: ModelConfig,
    info: ModelInfo,
    place: Place,
    encoder: EncoderPart | None = None,
    num_mrope_tokens: int = 0,
) -> ServedModel:
    """Return what serves a causal language model of `transformers` that lies at `place`, and whose
    attention is `ATTN_IMPLEMENTATION`, or its own if it knows no other. Raises `ConfigError` if
    nothing can.
    """
    dtype = next(module.parameters()).dtype
    warn_of_unsound(module)
    keep_experts_apart(module)
    set_long_factors(module, info.hf_config, info.max_model_len)
    place.keep_latents(module)
    states: LayerStates = MODEL_PARTS["states"](module, place.own_forward)
    try:
        # Of kernels for cards that it does not find, transformers warns at the first call.
        with quiet_transformers(), states.probing(), passed(module) as called:
            probe = probe_attention(module, info, has_states=bool(len(states)))
    except UnsupportedModelError as error:
        if not len(states) and not isinstance(error, NotADecoderError) and encoder is None:
            return _row_by_row(module, config, info, place, error)
        name = type(module).__name__
        raise ConfigError(f"unsupported architecture {name}: {error}") from error
    model = AnyModel(module, probe, dtype, states if len(states) else None, encoder)
    if config.fused and model.states is None:
        try:
            return fuse(model, module, probe, info.max_model_len, place, num_mrope_tokens)
        except NotFusedError as error:
            logger.info("%s runs as transformers wrote it, not fused: %s", model.name, error)
    _multiply(model, module, called, place, is_own=config.fused)
    model.take_apart(info)
    return model


def _multiply(
    model: ServedModel, module: nn.Module, called: set[nn.Linear], place: Place, *, is_own: bool
) -> None:
    """Have `module`, which `model` runs, compute with all of its weights: by our kernels if it
    `is_own` products that are wanted, and there are kernels.
    """
    ops = place.create_products() if is_own else None
    if ops is not None and place.multiplies_blocks:
        model.own = use_own_products(module, called, ops)
        model.is_stored = are_stored(module)
    unpack(module, place)
    widen_head(module, ops)


@torch.inference_mode()
def _row_by_row(
    module: nn.Module,
    config: ModelConfig,
    info: ModelInfo,
    place: Place,
    obstacle: UnsupportedModelError,
) -> RowByRowModel:
    """Return the slowest tier, for what `obstacle` keeps from the others."""
    use_default_attention(module)
    name = type(module).__name__
    try:
        with passed(module) as called:
            model = RowByRowModel(module, info.vocab_size)
        _multiply(model, module, called, place, is_own=config.fused)
        model.prove(place)
    except Exception as error:  # code of any kind of model
        raise ConfigError(
            f"unsupported architecture {name}: {obstacle}; and alone: {one_line(error)}"
        ) from error
    logger.warning("%s runs one request of a step at a time, which is slow: %s", name, obstacle)
    return model


def num_weight_bytes(config: ModelConfig, info: ModelInfo, place: Place) -> int:
    """Return bytes of the weights at `place`, by the headers of their files. Raises `ConfigError`.

    Includes the copy of a tied embedding that the fast tier makes for its head.
    """
    itemsize, source = named_dtype(config.dtype).itemsize, info.source
    # A model that sees is quantized once it lies in memory.
    rounding = rounding_of(config) if family_of(info) is None else None
    keeps_blocks = config.fused and place.multiplies_blocks
    num_bytes = source.num_bytes(itemsize, keeps_blocks=keeps_blocks, rounding=rounding)
    is_packed = rounding is not None or (keeps_blocks and source.packs_embedding)
    is_tied = getattr(info.hf_config, "tie_word_embeddings", False)
    if config.fused and is_tied and not is_packed:
        # what has no such size is refused later, by its name
        num_bytes += info.vocab_size * getattr(info.hf_config, "hidden_size", 0) * itemsize
    return int(num_bytes)


def named_dtype(name: str) -> torch.dtype:
    """Return the compute type of a `--dtype` setting, once "auto" is resolved."""
    return {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    }[name]


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No load report (we raise instead), and our kind of progress."""
    verbosity = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()
    previous = hf_logging.set_tqdm_hook(as_stage)
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)
        hf_logging.set_tqdm_hook(previous)
