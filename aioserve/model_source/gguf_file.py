"""A GGUF file, as llama.cpp writes them: configuration, tokenizer and weights in one.

`transformers` turns its metadata into a configuration and a tokenizer, and knows what llama.cpp did
to the weights of an architecture; here they are unpacked one by one, straight into the model, and
kept as they are beside it where they are multiplied so. What `transformers` would leave out in
silence, and answer wrongly without, is read here or refused.
"""

import json
import logging
import re
import struct
from collections import Counter
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from aioserve.errors import ConfigError, one_line
from aioserve.model_source.gguf_header import MAGIC, Header, Tensor, read_header
from aioserve.model_source.source import ModelSource, Rounding, not_loaded
from aioserve.sampling_defaults import SamplingDefaults, read_defaults

if TYPE_CHECKING:
    from aioserve.model_source.quantized import QuantizedWeight

logger = logging.getLogger(__name__)

INSTALL_LINE = "pip install 'aioserve[gguf]'"

_PIECE = 1 << 20  # weights that are unpacked at a time
_WHOLE = ("F32", "F16", "BF16")  # types of numbers that are not quantized
_EMBEDDING, _ROPE_DIVISORS = "token_embd.weight", "rope_freqs.weight"
# Ends of text, of a turn, and of a message to a tool.
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Recommended sampling: our name, and the name after general.sampling.
_SAMPLING = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
# Metadata of an architecture that `transformers` may leave at its default, and its name there.
_FIELDS = {
    "context_length": "max_position_embeddings",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
# What is read elsewhere, or only repeats what is.
_READ_OR_REPEATED = re.compile(
    r"rope\.|attention\.(value_length|causal)$|vocab_size$|expert_|pooling_type$"
)
# `<architecture>.pooling_type`, as llama.cpp numbers them.
_POOLINGS = {None: None, 0: None, 1: "mean", 3: "last"}
# What Llama 3.1 and later divide their frequencies by follows from these and the factor.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


class GgufFile(ModelSource):
    """One file, with all of its weights."""

    kind = "a local file"
    packs_embedding = True

    def __init__(self, path: Path, *, trust_remote_code: bool = False) -> None:
        """Reads the header. Raises `ConfigError` if no model can come of this file."""
        super().__init__(path, trust_remote_code=trust_remote_code)
        if find_spec("gguf") is None:
            raise ConfigError(f"{path} needs the package gguf: {INSTALL_LINE}")
        self._header: Header = read_header(path)
        metadata = self._header.metadata
        self._tensors = {tensor.name: tensor for tensor in self._header.tensors}
        self._architecture = str(metadata.get("general.architecture", ""))
        if reason := self._why_no_model(metadata):
            raise ConfigError(f"{path} {reason}")
        if trust_remote_code:
            raise ConfigError(
                f"model.trust_remote_code is True, which has no effect: {path} holds no code"
            )

    def _why_no_model(self, metadata: dict[str, Any]) -> str | None:
        if self._architecture == "clip" or metadata.get("general.type") == "mmproj":
            return "is the image part of a model (mmproj): give the file of its text model"
        if metadata.get("general.type") == "adapter":
            return "is an adapter (LoRA), not a model: these are not served"
        parts = metadata.get("split.count", 1)
        if parts > 1:
            return (
                f"is part {metadata.get('split.no', 0) + 1} of {parts}, which are not read: join "
                "them with llama-gguf-split --merge FIRST_PART OUTPUT.gguf"
            )
        if not self._architecture:
            return "does not name its architecture (general.architecture)"
        if _EMBEDDING not in self._tensors:
            return f"has no weights of a language model: there is no {_EMBEDDING} in it"
        return None

    @cached_property
    def known_config(self) -> dict[str, Any]:
        """What the metadata says by names of our own, and the rows of the embedding."""
        known = {field: self._stated(key) for key, field in _FIELDS.items()}
        known["vocab_size"] = self._tensors[_EMBEDDING].shape[0]
        return {name: value for name, value in known.items() if value is not None}

    @property
    def stated_eos(self) -> tuple[int, ...] | None:
        stated = (self._header.metadata.get(f"tokenizer.ggml.{key}") for key in _EOS_KEYS)
        return tuple(dict.fromkeys(token for token in stated if token is not None)) or None

    @property
    def stated_sampling(self) -> SamplingDefaults:
        """The sampling that llama.cpp writes as `general.sampling.*`."""
        metadata = self._header.metadata
        stated = {name: metadata.get(f"general.sampling.{key}") for name, key in _SAMPLING.items()}
        return read_defaults(stated, str(self.path))

    @property
    def stated_pooling(self) -> str | None:
        stated = self._stated("pooling_type")
        return _POOLINGS.get(stated, f"pooling_type {stated}")

    def read_config(self) -> Any:
        from transformers import AutoConfig

        try:
            # Not from the file itself: reading a vocabulary twice takes `transformers` seconds.
            with TemporaryDirectory() as nowhere, NamedTemporaryFile(suffix=".gguf") as file:
                file.write(self._without_vocabulary())
                file.flush()
                config = AutoConfig.from_pretrained(nowhere, gguf_file=file.name)
            rope = self._rope_scaling(config)
            if rope:
                config.rope_parameters = {**config.rope_parameters, **rope}
        except ConfigError:
            raise
        except Exception as error:  # transformers raises whatever the file provokes
            raise ConfigError(f"cannot read {self.path}: {one_line(error)}") from error
        for name, value in self.known_config.items():
            if hasattr(config, name):
                setattr(config, name, value)
        layers = (self._architecture, config.num_hidden_layers)
        if layers in (("gemma2", 46), ("gemma3", 62)):  # 27B: no file says it, llama.cpp knows it
            config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads
        return config

    def _warn_of_unread(self) -> None:
        from transformers.integrations import GGUF_CONFIG_MAPPING

        prefix = f"{self._architecture}."
        read = GGUF_CONFIG_MAPPING.get(self._architecture.replace("moe", "_moe"), {})
        keys = (key.removeprefix(prefix) for key in self._header.raw if key.startswith(prefix))
        unread = [k for k in keys if k not in {*read, *_FIELDS} and not _READ_OR_REPEATED.match(k)]
        if unread:
            logger.warning(
                "%s: aioserve ignores its %s: if they matter, answers will differ from the model's",
                self.path.name,
                ", ".join(unread),
            )

    def read_tokenizer(self) -> Any:
        from transformers import PreTrainedTokenizerFast

        try:
            # Beside the file there may be another model's tokenizer_config.json.
            with TemporaryDirectory() as nowhere:
                tokenizer = PreTrainedTokenizerFast.from_pretrained(
                    nowhere, gguf_file=str(self.path.absolute())
                )
            return self._without_strangers(tokenizer)
        except Exception as error:
            raise ConfigError(
                f"cannot read the tokenizer in {self.path}: {one_line(error)}"
            ) from error

    def _without_strangers(self, tokenizer: Any) -> Any:
        """Without the tokens that `transformers` adds to some vocabularies and the model has no
        weights for: what spells one is plain text to the model.
        """
        from tokenizers import Tokenizer
        from transformers import PreTrainedTokenizerFast

        size = self.known_config["vocab_size"]
        if len(tokenizer) <= size:
            return tokenizer
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < size]
        return PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(json.dumps(state)),
            chat_template=tokenizer.chat_template,
            add_bos_token=tokenizer.init_kwargs.get("add_bos_token", False),
            **tokenizer.special_tokens_map,
        )

    def num_bytes(
        self, itemsize: int, *, keeps_blocks: bool = False, rounding: Rounding | None = None
    ) -> float:
        from gguf import GGMLQuantizationType

        from aioserve.model_source.quantized import FORMATS, bytes_in_memory

        total = 0.0
        for tensor in self._header.tensors:
            kind = GGMLQuantizationType(tensor.type_id).name
            is_kept = keeps_blocks and kind in FORMATS and len(tensor.shape) == 2
            total += tensor.num_elements * (bytes_in_memory(kind) if is_kept else itemsize)
        return total

    def load_module(
        self,
        dtype: Any,
        device: Any,
        attn_implementation: str | None,
        *,
        keeps_blocks: bool = False,
        rounding: Rounding | None = None,
    ) -> Any:
        """Takes no more memory than the model and one tensor, in float32, beside it. What it has is
        not rounded again: `rounding` is None.
        """
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.initialization import no_init_weights

        try:
            with no_init_weights(), torch.device(device):
                module = AutoModelForCausalLM.from_config(
                    self.read_config(), dtype=dtype, attn_implementation=attn_implementation
                )
            module.tie_weights()
            self._fill(module, keeps_blocks)
        except ConfigError:
            raise
        except Exception as error:
            raise not_loaded(self.path, error, attn_implementation) from error
        self._warn_of_unread()
        return module.eval()

    def _fill(self, module: Any, keeps_blocks: bool) -> None:
        """Give every parameter its weights. Raises `ConfigError` for what is missing or left."""
        import torch
        from gguf import GGMLQuantizationType
        from torch import nn
        from transformers.modeling_gguf_pytorch_utils import (
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
        )
        from transformers.utils.logging import tqdm

        from aioserve.model_source.quantized import attach, stand_in

        name_of = type(module).__name__
        parameters = module.state_dict(keep_vars=True)
        processor = TENSOR_PROCESSORS.get(self._architecture, TensorProcessor)(
            config=module.config.to_dict()
        )
        # Without children: it would make the table of all names again for every module within.
        top = SimpleNamespace(
            config=module.config, state_dict=module.state_dict, named_children=tuple
        )
        targets = get_gguf_hf_weights_map(top, processor)
        parts = Counter(targets.values())  # those that are still to come
        # Experts come in two tensors for one parameter, which `transformers` puts together in here.
        joined: dict[str, Any] = {}
        missing, left, unpacked = set(parameters), [], Counter[str]()
        products = (nn.Linear, nn.Embedding)
        multiplied = {id(m.weight) for m in module.modules() if type(m) in products}
        with torch.no_grad():
            for tensor in tqdm(self._header.tensors, desc="Unpacking weights"):
                if tensor.name == _ROPE_DIVISORS:
                    continue  # in the configuration
                target = targets.get(tensor.name) or targets.get(
                    tensor.name.removesuffix(".weight")
                )
                parameter = parameters.get(target)
                stored = None
                if keeps_blocks and id(parameter) in multiplied:
                    stored = self._blocks(tensor, processor)
                if stored is not None and stored.shape == parameter.shape:
                    parameter.data = stand_in(stored.shape, parameter.dtype)
                    attach(parameter, stored)
                    missing -= {name for name, other in parameters.items() if other is parameter}
                    continue
                unpacked[GGMLQuantizationType(tensor.type_id).name] += tensor.num_bytes
                result = processor.process(
                    weights=_unpack(self.path, tensor),
                    name=tensor.name,
                    tensor_key_mapping=targets,
                    parsed_parameters={"tensors": joined},
                )
                if parameter is None:
                    left.append(tensor.name)
                    continue
                parts[target] -= 1
                weights = None if result.name is None else torch.from_numpy(result.weights)
                if weights is None and parts[target] == 0:
                    weights = joined.pop(target)
                if weights is None:
                    continue
                if parameter.shape != weights.shape:
                    raise ConfigError(
                        f"{self.path}: tensor {tensor.name} has the shape {tuple(weights.shape)}, "
                        f"{name_of} needs {tuple(parameter.shape)}"
                    )
                parameter.copy_(weights)
                missing -= {name for name, other in parameters.items() if other is parameter}
        sizes = {kind: size for kind, size in unpacked.items() if kind not in _WHOLE}
        if sizes:
            logger.info(
                "%s: %.0f MB of %s are unpacked to %s",
                self.path.name,
                sum(sizes.values()) / 1e6,
                ", ".join(sorted(sizes)),
                str(module.dtype).removeprefix("torch."),
            )
        if missing:
            raise ConfigError(
                f"{len(missing)} weights of {name_of} are not in {self.path}, first {min(missing)}"
            )
        if left:
            raise ConfigError(
                f"{len(left)} tensors of {self.path} have no place in {name_of} of transformers, "
                f"first {left[0]}: without them its answers would be wrong"
            )

    def _blocks(self, tensor: Tensor, processor: Any) -> "QuantizedWeight | None":
        """A matrix as it is stored, if its format is known and `transformers` would do no more to
        it than change the order of its rows; else None.
        """
        import numpy as np
        import torch
        from gguf import GGMLQuantizationType

        from aioserve.model_source.quantized import FORMATS, QuantizedWeight

        kind = GGMLQuantizationType(tensor.type_id).name
        if kind not in FORMATS or len(tensor.shape) != 2:
            return None
        numbers = np.arange(tensor.shape[0])[:, None]
        # a plain processor asks nothing of the model's names, and others give other shapes
        order = processor.process(
            weights=numbers, name=tensor.name, tensor_key_mapping={}, parsed_parameters={}
        ).weights
        is_order = order is not None and order.shape == numbers.shape
        if not is_order or not np.array_equal(np.sort(order, axis=0), numbers):
            return None
        rows = _read(self.path, tensor).reshape(tensor.shape[0], -1)
        return QuantizedWeight(kind, torch.from_numpy(rows[order[:, 0]]))

    def _stated(self, key: str) -> Any:
        return self._header.metadata.get(f"{self._architecture}.{key}")

    def _rope_scaling(self, config: Any) -> dict[str, Any]:
        """What stretches the rotary embedding, which `transformers` does not read. Raises
        `ConfigError` if it is something that cannot be said to it.
        """
        kind = self._stated("rope.scaling.type") or "none"
        by_layer = any(isinstance(value, dict) for value in config.rope_parameters.values())
        factor = self._stated("rope.scaling.factor") or self._stated("rope.scale_linear")
        others = [name for name in self._tensors if name.startswith("rope_factors")]
        if not others and _ROPE_DIVISORS not in self._tensors and kind == "none" and factor is None:
            return {}
        if others or by_layer or kind not in ("none", "linear", "yarn"):
            raise ConfigError(f"{self.path}: its scaled rotary embedding ({kind}) is not served")
        if _ROPE_DIVISORS in self._tensors:
            return self._llama3_rope(config)
        if kind == "yarn":
            length = self._stated("rope.scaling.original_context_length")
            return {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": length,
            }
        return {"rope_type": "linear", "factor": factor}

    def _llama3_rope(self, config: Any) -> dict[str, Any]:
        """The settings that the divisors of the frequencies in the file come from."""
        import torch
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        divisors = torch.from_numpy(_unpack(self.path, self._tensors[_ROPE_DIVISORS]))
        plain = dict(config.rope_parameters)
        rope = {**plain, "rope_type": "llama3", "factor": float(divisors.max()), **_LLAMA3}
        theta, size = plain["rope_theta"], 2 * len(divisors)
        frequencies = theta ** -(torch.arange(0, size, 2, dtype=torch.float32) / size)
        config.rope_parameters = rope
        expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        config.rope_parameters = plain
        same_length = len(expected) == len(divisors)
        if not same_length or not torch.allclose(frequencies / divisors, expected, rtol=1e-3):
            raise ConfigError(
                f"{self.path}: {_ROPE_DIVISORS} is not what Llama 3 has, and is not served"
            )
        return rope

    def _without_vocabulary(self) -> bytes:
        """A GGUF file of the same configuration, with the names of its tensors and no weights."""
        raw = list(self._header.raw.values())
        key = f"{self._architecture}.vocab_size"
        if key not in self._header.raw:  # else the length of the vocabulary
            size = self.known_config["vocab_size"]
            raw.append(_string(key) + struct.pack("<II", 4, size))
        empty = struct.pack("<IQIQ", 1, 0, 0, 0)  # one dimension, of size 0, float32, at the start
        return b"".join(
            [
                MAGIC,
                struct.pack("<IQQ", 3, len(self._tensors), len(raw)),
                *raw,
                *(_string(name) + empty for name in self._tensors),
                bytes(64),
            ]
        )


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _read(path: Path, tensor: Tensor) -> Any:
    """Its bytes, a numpy array."""
    import numpy as np

    return np.fromfile(path, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset)


def _unpack(path: Path, tensor: Tensor) -> Any:
    """The weights as float32, a numpy array of the tensor's shape."""
    import numpy as np
    from gguf import GGMLQuantizationType, dequantize

    kind = GGMLQuantizationType(tensor.type_id)
    rows = _read(path, tensor).reshape(
        -1, tensor.num_bytes * tensor.shape[-1] // tensor.num_elements
    )
    weights = np.empty((len(rows), tensor.shape[-1]), dtype=np.float32)
    step = max(1, _PIECE // tensor.shape[-1])  # `dequantize` takes several times what it returns
    try:
        for start in range(0, len(rows), step):
            piece = slice(start, start + step)
            weights[piece] = dequantize(rows[piece], kind)
    except NotImplementedError as error:
        raise ConfigError(
            f"{path}: tensor {tensor.name} is {kind.name}, which cannot be unpacked: "
            f"{one_line(error)}"
        ) from None
    return weights.reshape(tensor.shape)
