"""A Hugging Face directory: config.json, *.safetensors, and the files of a tokenizer.

Reads itself what is JSON and leaves the rest to `transformers`.
"""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from aioserve.errors import ConfigError, one_line
from aioserve.model_source.source import ModelSource, Rounding, check_file, not_loaded, read_json
from aioserve.model_source.stated_values import check_config
from aioserve.params import SamplingDefaults, read_defaults

logger = logging.getLogger(__name__)

# Where config.json may describe the text model of a larger one, as `get_text_config` looks for it.
TEXT_PARTS = ("decoder", "generator", "text_config")


class GenerationConfig(msgspec.Struct):
    """The fields of generation_config.json that are read."""

    eos_token_id: int | list[int] | None = None
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    min_p: Any = None
    repetition_penalty: Any = None
    max_new_tokens: Any = None


class _Index(msgspec.Struct):
    """The fields of model.safetensors.index.json that are read."""

    weight_map: dict[str, str]  # the file of each tensor


# Inside, where files are read as well.
_FOLDERS = ("1_Pooling", "additional_chat_templates")


class Directory(ModelSource):
    """A model in a local directory, as `save_pretrained` of transformers writes it."""

    def __init__(self, path: Path, *, trust_remote_code: bool = False) -> None:
        super().__init__(path, trust_remote_code=trust_remote_code)
        for folder in (path, *(path / name for name in _FOLDERS)):
            for file in folder.iterdir() if folder.is_dir() else ():
                check_file(file)  # `transformers` opens more of them than we do

    @cached_property
    def _config(self) -> dict[str, Any]:
        path = self.path / "config.json"
        config = read_json(path, dict[str, Any])
        check_config(str(path), config)
        for part in TEXT_PARTS:
            if isinstance(inner := config.get(part), dict):
                check_config(f"{path}: {part}", inner)
        return config

    @property
    def model_type(self) -> str:
        return str(self._config.get("model_type", ""))

    @cached_property
    def known_config(self) -> dict[str, Any]:
        """The content of config.json; empty if the text model is described in a part of it."""
        config = self._config
        return {} if any(isinstance(config.get(part), dict) for part in TEXT_PARTS) else config

    @cached_property
    def stated_eos(self) -> tuple[int, ...] | None:
        """The EOS token ids that generation_config.json states; None if it states none."""
        eos = self._generation_config.eos_token_id
        if eos is None:
            return None
        return (eos,) if isinstance(eos, int) else tuple(eos)

    @property
    def stated_sampling(self) -> SamplingDefaults:
        """The sampling that generation_config.json states. As in vLLM, `do_sample` is not asked."""
        stated = msgspec.structs.asdict(self._generation_config)
        del stated["eos_token_id"]
        stated["max_tokens"] = stated.pop("max_new_tokens")
        return read_defaults(stated, str(self.path / "generation_config.json"))

    @cached_property
    def _generation_config(self) -> GenerationConfig:
        path = self.path / "generation_config.json"
        return read_json(path, GenerationConfig) if path.is_file() else GenerationConfig()

    @cached_property
    def stated_pooling(self) -> str | None:
        """The pooling that sentence-transformers has written beside the model."""
        return read_pooling(self.path)

    def read_config(self) -> Any:
        from transformers import AutoConfig

        _ = self._config  # what no model has is refused by name before it is computed with
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

        from aioserve.model_source.growth import check_growth

        check_growth(self.path / "tokenizer.json")  # the library would try it on its own tokens
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
        """Return whether `AutoTokenizer`, which imports torch to find that out, would choose
        `PreTrainedTokenizerFast`: it overrides the class of some kinds of models, not of Llama's.
        """
        path = self.path / "tokenizer_config.json"
        if self.known_config.get("model_type") != "llama" or not path.is_file():
            return False
        config = read_json(path, dict[str, Any])
        is_plain = config.get("tokenizer_class") == "PreTrainedTokenizerFast"
        return is_plain and "auto_map" not in {*config, *self.known_config}

    @cached_property
    def quantization_config(self) -> dict[str, Any]:
        """The `quantization_config` of config.json; empty if the weights are not quantized."""
        config = self._config
        parts = [config, *(config.get(part) for part in TEXT_PARTS)]
        names = ("quantization_config", "compression_config")
        found = (part.get(name) for part in parts if isinstance(part, dict) for name in names)
        return next((stated for stated in found if isinstance(stated, dict) and stated), {})

    def num_bytes(
        self, itemsize: int, *, keeps_blocks: bool = False, rounding: Rounding | None = None
    ) -> float:
        with ExitStack() as files:
            shapes = [tensor.get_shape() for _, tensor in self._tensors(files)]
        return float(itemsize * sum(map(math.prod, shapes)))

    def load_module(
        self,
        dtype: Any,
        device: Any,
        attn_implementation: str | None,
        *,
        keeps_blocks: bool = False,
        rounding: Rounding | None = None,
    ) -> Any:
        try:
            module, report = self._load(dtype, device, attn_implementation, keeps_blocks, rounding)
        except ConfigError:
            raise
        except Exception as error:  # transformers raises whatever the files provoke
            raise not_loaded(self.path, error, attn_implementation) from error
        self._check_complete(module, report)
        return module.to(device)

    def _load(
        self,
        dtype: Any,
        device: Any,
        attn_implementation: str | None,
        keeps_blocks: bool,
        rounding: Rounding | None,
    ) -> tuple[Any, Any]:
        """Return the module, and the report of `transformers` about its weights."""
        from transformers import AutoModelForCausalLM

        assert rounding is None, "then it is another kind of directory"
        return self._load_whole(AutoModelForCausalLM, dtype, device, attn_implementation)

    @contextmanager
    def open_weights(self) -> Iterator[dict[str, Callable[[], Any]]]:
        with ExitStack() as files:
            yield {name: partial(tensor.__getitem__, ...) for name, tensor in self._tensors(files)}

    def load_seeing_module(self, dtype: Any, device: Any, attn_implementation: str) -> Any:
        from transformers import AutoModelForImageTextToText

        try:
            module, report = self._load_whole(
                AutoModelForImageTextToText, dtype, device, {"text_config": attn_implementation}
            )
        except Exception as error:  # transformers raises whatever the files provoke
            raise not_loaded(self.path, error, attn_implementation) from error
        self._check_complete(module, report)
        return module.to(device)

    def _check_complete(self, module: Any, report: Any) -> None:
        """Raises `ConfigError` for weights that are missing, or of another shape."""
        if report["mismatched_keys"]:
            name, stored, expected = min(report["mismatched_keys"])
            raise ConfigError(
                f"cannot load the model in {self.path}: {name} is {list(stored)} in its files, and "
                f"{list(expected)} by its configuration"
            )
        missing = sorted(report["missing_keys"])
        if missing:
            raise ConfigError(
                f"{len(missing)} weights of {type(module).__name__} are not in the *.safetensors "
                f"files of {self.path}, first {missing[0]}"
            )

    def _load_whole(
        self, auto_class: Any, dtype: Any, device: Any, attn_implementation: Any
    ) -> tuple[Any, Any]:
        # With accelerate, files are read straight to a device; without, through the host's memory.
        is_direct = device.type != "cpu" and find_spec("accelerate") is not None
        found: tuple[Any, Any] = auto_class.from_pretrained(
            self.path,
            dtype=dtype,
            attn_implementation=attn_implementation,
            trust_remote_code=self.trust_remote_code,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # the caller names one
            device_map=device if is_direct else None,
        )
        return found

    def _tensors(self, files: ExitStack) -> Iterator[tuple[str, Any]]:
        """Yield what is in the files, not read yet. Raises `ConfigError` that names a damaged
        one.
        """
        from safetensors import SafetensorError, safe_open

        for path in self._weight_files():
            check_file(path)
            try:  # it compares its header with its size
                file = files.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"cannot read weights {path}: {one_line(error)}") from error
            for name in file.keys():  # noqa: SIM118, it is no dict
                yield name, file.get_slice(name)

    def _weight_files(self) -> list[Path]:
        """Return the files that `from_pretrained` will read."""
        index = self.path / "model.safetensors.index.json"
        if index.is_file():
            names = set(read_json(index, _Index).weight_map.values())
            files = [self.path / name for name in sorted(names)]
        else:
            files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise ConfigError(f"no *.safetensors weights in model directory {self.path}")
        return files


# How a model of embeddings pools, as sentence-transformers has written it beside the weights. Reads
# two files of a model directory. Judges nothing.


# How sentence-transformers calls what is served, and its modules that are.
_POOLINGS = {"mean_tokens": "mean", "lasttoken": "last"}
_MODULES = ("Transformer", "Pooling", "Normalize")


class _Module(msgspec.Struct):
    """The fields of an entry of modules.json that are read."""

    type: str


def read_pooling(directory: Path) -> str | None:
    """Return what the directory states: `mean`, `last` or a name that is not served, and the
    modules behind it that are not; None if it states nothing.
    """
    path = directory / "1_Pooling" / "config.json"
    if not path.is_file():
        return None
    config = read_json(path, dict[str, Any])
    modes = [
        name.removeprefix("pooling_mode_")
        for name, value in config.items()
        if name.startswith("pooling_mode_") and value is True
    ]
    stated = config.get("pooling_mode") or " and ".join(modes)  # of newer versions, of older
    pooling = _POOLINGS.get(str(stated), str(stated))
    modules = directory / "modules.json"
    kinds = [m.type for m in read_json(modules, list[_Module])] if modules.is_file() else []
    more = [kind for kind in (k.rpartition(".")[2] for k in kinds) if kind not in _MODULES]
    return ", then ".join([pooling, *more])
