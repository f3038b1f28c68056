"""A GGUF file, as llama.cpp writes them: configuration, tokenizer and weights in one.

What its metadata mean is in `architectures`; its tokenizer is read by `transformers`. Weights
are unpacked one by one, straight into the model, and kept as they are beside it where they are
multiplied so. A model in several files is named by its first.
"""

import json
from collections.abc import Mapping
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from aioserve.errors import ConfigError, one_line
from aioserve.features.gguf.architectures import ARCHITECTURES
from aioserve.features.gguf.config import (
    DIVISORS,
    LONG,
    SHORT,
    Facts,
    Metadata,
    RopeTensors,
    read_fields,
)
from aioserve.features.gguf.header import Header, read_header, read_parts, unpack
from aioserve.features.gguf.weights import Filling, fill
from aioserve.model_source.source import ModelSource, Rounding, not_loaded
from aioserve.params import SamplingDefaults, read_defaults

INSTALL_LINE = "pip install gguf"

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
    """A GGUF file, or its parts, with all weights of a model."""

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
        """Return the fields of the configuration, its type among them."""
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

        from aioserve.features.quantized import FORMATS, bytes_in_memory

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


# How a byte-level vocabulary of a GGUF file splits text before it merges: `tokenizer.ggml.pre`.
# `transformers` knows some of these names, and takes GPT-2's way for all others, in silence. Here
# are those of the architectures that are served; another name is refused, for its tokens would be
# others than those that the model has learned.


#: Names of GPT-2's own way, and of none.
_AS_GPT2 = (
    *("default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling"),
    *("exaone4", "gigachat", "a.x-4.0", "mellum", "modern-bert", "jina-es", "jina-de"),
    *("jina-v1-en", "jina-v2-es", "jina-v2-de", "jina-v2-code", "roberta-bpe"),
)
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_SEED = _QWEN2.replace(r"| ?[^\s\p{L}\p{N}]+[\r\n]*|", r"| ?[^\s\p{L}\p{N}\r\n]+|")
_DIGIT = r"\p{N}"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
#: Letters that have cases, as DeepSeek's tokenizer lists them; some scripts are left out.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5"
    "\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    "\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149"
    "\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    _DIGIT,
)
_DEEPSEEK_CODER = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    _DIGIT,
)
_BLOOM = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_GPT2 = "GPT-2"  # in the place of an expression: its own way, among the pieces so far
#: Expressions that are applied one after the other: what each finds becomes a piece of its own.
_SPLITS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("chatglm-bpe", "glm4", "glm5"), (_LLAMA3,)),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2"), (_QWEN2,)),
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"),
        (_DIGIT, _GPT2),
    ),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK3),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), (_BLOOM,)),
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-llm": _DEEPSEEK_LLM,
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
    "seed-coder": (_SEED,),
    "viking": (_BLOOM, _DIGIT),
}


def split_as_stated(path: Path, metadata: Mapping[str, Any], tokenizer: Any) -> None:
    """Have a tokenizer that `transformers` made split text as its file states. Raises `ConfigError`
    for a way that is not known.
    """
    from tokenizers import Regex, pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    stated = metadata.get("tokenizer.ggml.pre", "default")
    if metadata.get("tokenizer.ggml.model") != "gpt2" or stated in _AS_GPT2:
        return
    if stated in GGUF_PRE_TOKENIZER_SPLITS:
        return
    if stated not in _SPLITS:
        raise ConfigError(
            f"{path}: tokenizer.ggml.pre is {stated!r:.49}, a way to split text that is not read; "
            "its tokens would not be those that the model has learned"
        )
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    steps = [
        gpt2 if split == _GPT2 else pre_tokenizers.Split(Regex(split), "isolated")
        for split in _SPLITS[stated]
    ]
    if _GPT2 not in _SPLITS[stated]:
        steps.append(last)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
