"""A Hugging Face directory: config.json, *.safetensors, and the files of a tokenizer.

Reads itself what is JSON and leaves the rest to `transformers`.
"""

import json
import math
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from aioserve.errors import ConfigError
from aioserve.model_source.source import ModelSource, one_line, why_not_loaded

T = TypeVar("T")

# Where config.json may describe the text model of a larger one, as `get_text_config` looks for it.
TEXT_PARTS = ("decoder", "generator", "text_config")


class GenerationConfig(msgspec.Struct):
    """What is read of generation_config.json."""

    eos_token_id: int | list[int] | None = None


class _Module(msgspec.Struct):
    """What is read of an entry of modules.json."""

    type: str


# How sentence-transformers calls what is served, and its modules that are.
_POOLINGS = {"mean_tokens": "mean", "lasttoken": "last"}
_MODULES = ("Transformer", "Pooling", "Normalize")


class Directory(ModelSource):
    """What `save_pretrained` writes."""

    kind = "a local directory"

    @cached_property
    def known_config(self) -> dict[str, Any]:
        """What config.json says; nothing if the text model is described somewhere inside of it."""
        config = _read_json(self.path / "config.json", dict[str, Any])
        return {} if any(isinstance(config.get(part), dict) for part in TEXT_PARTS) else config

    @cached_property
    def stated_eos(self) -> tuple[int, ...] | None:
        """What generation_config.json says."""
        path = self.path / "generation_config.json"
        if not path.is_file():
            return None
        eos = _read_json(path, GenerationConfig).eos_token_id
        if eos is None:
            return None
        return (eos,) if isinstance(eos, int) else tuple(eos)

    @cached_property
    def stated_pooling(self) -> str | None:
        """What sentence-transformers has written beside the model."""
        path = self.path / "1_Pooling" / "config.json"
        if not path.is_file():
            return None
        config = _read_json(path, dict[str, Any])
        modes = [
            name.removeprefix("pooling_mode_")
            for name, value in config.items()
            if name.startswith("pooling_mode_") and value is True
        ]
        stated = config.get("pooling_mode") or " and ".join(modes)  # of newer versions, of older
        pooling = _POOLINGS.get(str(stated), str(stated))
        modules = self.path / "modules.json"
        kinds = [m.type for m in _read_json(modules, list[_Module])] if modules.is_file() else []
        more = [kind for kind in (k.rpartition(".")[2] for k in kinds) if kind not in _MODULES]
        return ", then ".join([pooling, *more])

    def read_config(self) -> Any:
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(
                self.path, trust_remote_code=self.trust_remote_code, local_files_only=True
            )
        except Exception as error:  # transformers raises whatever the file provokes
            raise ConfigError(
                f"cannot read {self.path / 'config.json'}: {one_line(error)}"
            ) from error

    def read_tokenizer(self) -> Any:
        import transformers

        name = "PreTrainedTokenizerFast" if self._has_plain_tokenizer() else "AutoTokenizer"
        try:
            return getattr(transformers, name).from_pretrained(
                self.path, trust_remote_code=self.trust_remote_code
            )
        except Exception as error:
            raise ConfigError(
                f"cannot read the tokenizer of {self.path}: {one_line(error)}"
            ) from error

    def _has_plain_tokenizer(self) -> bool:
        """Whether `AutoTokenizer`, which imports torch to find that out, would choose
        `PreTrainedTokenizerFast`: it overrides the class of some kinds of models, not of Llama's.
        """
        path = self.path / "tokenizer_config.json"
        if self.known_config.get("model_type") != "llama" or not path.is_file():
            return False
        config = _read_json(path, dict[str, Any])
        is_plain = config.get("tokenizer_class") == "PreTrainedTokenizerFast"
        return is_plain and "auto_map" not in {*config, *self.known_config}

    def num_elements(self) -> int:
        return sum(map(_num_elements, self._weight_files()))

    def load_module(
        self, dtype: Any, device: Any, attn_implementation: str, *, keeps_blocks: bool = False
    ) -> Any:
        from transformers import AutoModelForCausalLM

        # With accelerate, files are read straight to a device; without, through the host's memory.
        is_direct = device.type != "cpu" and find_spec("accelerate") is not None
        try:
            module, report = AutoModelForCausalLM.from_pretrained(
                self.path,
                dtype=dtype,
                attn_implementation=attn_implementation,
                trust_remote_code=self.trust_remote_code,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                device_map=device if is_direct else None,
            )
        except Exception as error:  # transformers raises whatever the files provoke
            why = why_not_loaded(error, attn_implementation)
            raise ConfigError(f"cannot load the model in {self.path}: {why}") from error
        missing = sorted(report["missing_keys"])
        if missing:
            raise ConfigError(
                f"{len(missing)} weights of {type(module).__name__} are not in the *.safetensors "
                f"files of {self.path}, first {missing[0]}"
            )
        return module.to(device)

    def _weight_files(self) -> list[Path]:
        """The files that `from_pretrained` will read."""
        index = self.path / "model.safetensors.index.json"
        if index.is_file():
            try:
                names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConfigError(f"cannot read {index}: {one_line(error)}") from error
            files = [self.path / name for name in sorted(names)]
        else:
            files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise ConfigError(f"no *.safetensors weights in model directory {self.path}")
        return files


def _read_json(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def _num_elements(file: Path) -> int:
    """Raises `ConfigError` that names a damaged file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as weights:  # compares its header with its size
            names = weights.keys()
            return sum(math.prod(weights.get_slice(name).get_shape()) for name in names)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"cannot read weights {file}: {one_line(error)}") from error
