"""A GGUF file, as llama.cpp writes them: configuration, tokenizer and weights in one.

What its metadata mean is in `gguf_architectures`; its tokenizer is read by `transformers`. Weights
are unpacked one by one, straight into the model, and kept as they are beside it where they are
multiplied so. A model in several files is named by its first.
"""

import json
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from aioserve.errors import ConfigError, one_line
from aioserve.model_source.gguf_architectures import ARCHITECTURES
from aioserve.model_source.gguf_config import Facts, read_fields
from aioserve.model_source.gguf_filling import Filling
from aioserve.model_source.gguf_header import Header, read_header
from aioserve.model_source.gguf_metadata import Metadata
from aioserve.model_source.gguf_parts import read_parts
from aioserve.model_source.gguf_rope import DIVISORS, LONG, SHORT, RopeTensors
from aioserve.model_source.gguf_splits import split_as_stated
from aioserve.model_source.gguf_tensors import unpack
from aioserve.model_source.gguf_weights import fill
from aioserve.model_source.source import ModelSource, Rounding, not_loaded
from aioserve.params import SamplingDefaults, read_defaults

INSTALL_LINE = "pip install 'aioserve[gguf]'"

_EMBEDDING = "token_embd.weight"
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
# `<architecture>.pooling_type`, as llama.cpp numbers them.
_POOLINGS = {None: None, 0: None, 1: "mean", 3: "last"}


class GgufFile(ModelSource):
    """One file, with all of its weights."""

    kind = "a local file"
    packs_embedding = True

    def __init__(self, path: Path, *, trust_remote_code: bool = False) -> None:
        """Reads the header. Raises `ConfigError` if no model can come of this file."""
        super().__init__(path, trust_remote_code=trust_remote_code)
        if find_spec("gguf") is None:
            raise ConfigError(f"{path} needs the package gguf: {INSTALL_LINE}")
        self._header: Header = read_parts(path, read_header(path))
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
        if not self._architecture:
            return "does not name its architecture (general.architecture)"
        if self._architecture not in ARCHITECTURES:
            return f"has the architecture {self._architecture!r:.99}, which is not served as GGUF"
        if _EMBEDDING not in self._tensors:
            return f"has no weights of a language model: there is no {_EMBEDDING} in it"
        return None

    @cached_property
    def known_config(self) -> dict[str, Any]:
        """How long a text may be, and the rows of the embedding."""
        known = {"vocab_size": self._tensors[_EMBEDDING].shape[0]}
        if (length := self._stated("context_length")) is not None:
            known["max_position_embeddings"] = length
        return known

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
            return AutoConfig.for_model(**self._fields())
        except ConfigError:
            raise
        except Exception as error:  # transformers and numbers raise whatever the file provokes
            raise ConfigError(f"cannot read {self.path}: {one_line(error)}") from error

    def _fields(self) -> dict[str, Any]:
        """The fields of the configuration, its type among them."""
        metadata = self._header.metadata
        rope = [
            unpack(self._tensors[name]).tolist() if name in self._tensors else None
            for name in (DIVISORS, LONG, SHORT)
        ]
        facts = Facts(
            Metadata(self.path, self._architecture, metadata),
            {name: tensor.shape for name, tensor in self._tensors.items()},
            RopeTensors(*rope),
        )
        facts.fields["vocab_size"] = self._tensors[_EMBEDDING].shape[0]
        for name in ("bos", "eos", "padding"):  # the defaults are those of published models
            token = metadata.get(f"tokenizer.ggml.{name}_token_id")
            is_token = token is not None and token < facts.fields["vocab_size"]
            facts.fields[f"{name[:3]}_token_id"] = token if is_token else None
        return read_fields(ARCHITECTURES[self._architecture], facts)

    def read_tokenizer(self) -> Any:
        from transformers import PreTrainedTokenizerFast

        try:
            # Beside the file there may be another model's tokenizer_config.json.
            with TemporaryDirectory() as nowhere:
                tokenizer = PreTrainedTokenizerFast.from_pretrained(
                    nowhere, gguf_file=str(self.path.absolute())
                )
            split_as_stated(self.path, self._header.metadata, tokenizer)
            return self._without_strangers(tokenizer)
        except ConfigError:
            raise
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

        packs_experts = ARCHITECTURES[self._architecture].packs_experts
        total = 0.0
        for tensor in self._header.tensors:
            kind = GGMLQuantizationType(tensor.type_id).name
            is_packed = packs_experts and tensor.name.endswith("_exps.weight")
            is_matrix = len(tensor.shape) == 2 or is_packed
            is_kept = keeps_blocks and kind in FORMATS and is_matrix
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
            fill(module, self.path, self._header.tensors, self._filling(), keeps_blocks)
        except ConfigError:
            raise
        except Exception as error:
            raise not_loaded(self.path, error, attn_implementation) from error
        return module.eval()

    @property
    def is_quantized(self) -> bool:
        return True

    def stored_kinds(self, outline: Any) -> dict[str, str]:
        return self._filling().stored_kinds(outline, self._header.tensors)

    def _filling(self) -> Filling:
        architecture = ARCHITECTURES[self._architecture]
        return Filling(
            architecture,
            self._architecture,
            self._fields(),
            (DIVISORS, LONG, SHORT),
            self._header.metadata,
        )

    def _stated(self, key: str) -> Any:
        return self._header.metadata.get(f"{self._architecture}.{key}")
