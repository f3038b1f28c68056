"""What a model says about itself: limits, EOS tokens, tokenizer, chat template.

Finds the model that the settings mean; how it lies on disk is known to its source. The engine's
door and the runner's loader read the same facts here.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from aioserve.config import EMBEDDED_MODEL, ModelConfig
from aioserve.errors import ConfigError, one_line
from aioserve.model_source.source import KINDS, ModelSource, check_file
from aioserve.params import NO_DEFAULTS, SamplingDefaults

# A model that states no limit (or an absurd one) is served to this length, in tokens.
FALLBACK_MAX_MODEL_LEN = 2048

#: Fields that no configuration of `transformers` adds to those that a file states.
ADDED_FIELDS = {"matryoshka_dimensions", "is_matryoshka"}


class ModelInfo:
    """Facts of one model. Raises `ConfigError` if it cannot be found or read."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.source = find_model(config)

    def _read(self, name: str) -> Any:
        """Return a value of the configuration. `transformers`, which takes seconds to import, is
        asked only for what the source cannot tell without it.
        """
        known = self.source.known_config
        if (value := known.get(name)) is None and not (known and name in ADDED_FIELDS):
            value = getattr(self.hf_config, name, None)
        return value

    @cached_property
    def whole_config(self) -> Any:
        """The `transformers` configuration, of which the text model's may be a part."""
        return self.source.read_config()

    @property
    def hf_config(self) -> Any:
        """The text model's `transformers` configuration."""
        return self.whole_config.get_text_config(decoder=True)

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a reply: those stated for generation, else the configuration's."""
        if self.source.stated_eos is not None:
            return self.source.stated_eos
        eos = self._convert("eos_token_id", int | list[int] | None)
        return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)

    @cached_property
    def sampling_defaults(self) -> SamplingDefaults:
        """How a request is sampled where it does not say so: as the model's files recommend, or as
        is known of a model that was fetched by name. Raises `ConfigError` for values that make no
        sense.
        """
        if self.config.generation_config == "none":
            return NO_DEFAULTS
        stated, name = self.source.stated_sampling, self.config.model
        if stated != NO_DEFAULTS or name == EMBEDDED_MODEL or Path(name).exists():
            return stated
        from aioserve.model_source.downloads import DOWNLOADS

        return DOWNLOADS[name].sampling if name in DOWNLOADS else stated

    @property
    def stated_pooling(self) -> str | None:
        """How it was saved to make a vector of a prompt: `mean`, `last`, something else in words;
        None if that is not said.
        """
        return self.source.stated_pooling

    @cached_property
    def matryoshka_dimensions(self) -> Sequence[int]:
        """Lengths to which its vectors may be cut, as the model states; empty: none."""
        if stated := self._convert("matryoshka_dimensions", list[int] | None):
            return sorted(stated)
        if self._read("is_matryoshka"):
            return range(1, self.hidden_size + 1)
        return ()

    @property
    def hidden_size(self) -> int:
        """Numbers of a hidden state, and of an embedding."""
        return self._size("hidden_size")

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding: token ids from 0 to one less."""
        return self._size("vocab_size")

    @cached_property
    def max_model_len(self) -> int:
        """Prompt and output together, in tokens: the setting, else what the model states."""
        if self.config.max_model_len is not None:
            return self.config.max_model_len
        return self._num_positions or FALLBACK_MAX_MODEL_LEN

    def check_positions(self) -> None:
        """Raises `ConfigError` if more is asked than the model has; not asked where none is run."""
        limit = self._num_positions
        if limit is not None and self.max_model_len > limit:
            raise ConfigError(
                f"max_model_len is {self.max_model_len}, but {self.config.model} has "
                f"{limit} positions"
            )

    @property
    def _num_positions(self) -> int | None:
        name = "max_position_embeddings"
        return None if self._read(name) is None else self._size(name)

    def _convert(self, name: str, kind: Any) -> Any:
        """Raises `ConfigError` if it is of another type."""
        try:
            return msgspec.convert(self._read(name), kind)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{name} of {self.config.model} cannot be: {error}") from error

    def _size(self, name: str) -> int:
        """Raises `ConfigError` if it is not stated, or is nothing to count with."""
        value = self._read(name)
        if type(value) is not int or value < 1:
            raise ConfigError(f"{name} of {self.config.model} is {value!r}, not a positive number")
        return value

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer, which has every method of one of `transformers`. Raises `ConfigError`,
        also if it was not wanted.
        """
        if self.config.skip_tokenizer_init:
            raise ConfigError("text needs the tokenizer, but skip_tokenizer_init is set")
        from aioserve.model_source.kept_tokenizer import read_tokenizer

        tokenizer = read_tokenizer(self.source, keep=self.config.keep_prepared)
        if self.chat_template is not None:
            tokenizer.chat_template = self.chat_template
        return tokenizer

    @cached_property
    def chat_template(self) -> str | None:
        """The chat template that the settings name, in the place of the model's own; None: they
        name none. Raises `ConfigError` if the file cannot be read.
        """
        if self.config.chat_template is None:
            return None
        path = Path(self.config.chat_template)
        if not path.is_file():
            raise ConfigError(f"model.chat_template: there is no file {path}")
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"model.chat_template: cannot read {path}: {one_line(error)}"
            ) from error


def find_model(config: ModelConfig) -> ModelSource:
    """Return the model that is meant: a path, one that we know by name, or one of the hub. Raises
    `ConfigError`.
    """
    path = Path(config.model).expanduser()
    if config.model == EMBEDDED_MODEL:
        _check_no_revision(config, "shipped with aioserve")
        path = Path(__file__).parent / "embedded"
    elif path.exists():
        kind = "a local directory" if path.is_dir() else "a local file"
        _check_no_revision(config, kind)
    elif (fetched := _fetched_by_name(config)) is not None:
        path = fetched
    elif config.model.count("/") <= 1 and not config.model.startswith((".", "/", "~")):
        if path.suffix == ".gguf":
            raise ConfigError(f"no file {config.model}")
        path = _fetch_from_hub(config)
    else:
        raise ConfigError(f"no model directory or GGUF file at {config.model}")
    check_file(path)
    if path.is_file():
        if config.quantization is not None:
            raise ConfigError(
                f"model.quantization is {config.quantization!r}, but {path} is a GGUF file, whose "
                "weights are served in the types that it has"
            )
        return KINDS["gguf"](path, trust_remote_code=config.trust_remote_code)
    check_file(path / "config.json")
    if not (path / "config.json").is_file():
        files = sorted(path.glob("*.gguf"))
        meant = f"; a GGUF file is named itself: {files[0]}" if files else ""
        raise ConfigError(f"no config.json in model directory {path}{meant}")
    from aioserve.model_source.directory import Directory

    directory = Directory(path, trust_remote_code=config.trust_remote_code)
    try:
        stated = directory.quantization_config
    except ConfigError:  # told with what else is wrong, when the model is looked at
        return directory
    if config.quantization is None and not stated:
        return directory
    if config.quantization is not None and stated:
        raise ConfigError(
            f"model.quantization is {config.quantization!r}, but the weights in {path} are of few "
            f"bits already ({stated.get('quant_method')})"
        )
    return KINDS["quantized directory"](path, trust_remote_code=config.trust_remote_code)


def _fetched_by_name(config: ModelConfig) -> Path | None:
    """Return the file of a model that the command `fetch` knows; None for any other name."""
    from aioserve.model_source.downloads import DOWNLOADS, downloaded

    if config.model not in DOWNLOADS:
        return None
    _check_no_revision(config, "fetched by its name")
    return downloaded(config.model)


def _check_no_revision(config: ModelConfig, where: str) -> None:
    if config.revision is not None:
        raise ConfigError(
            f"model.revision is {config.revision!r}, which has no effect: {config.model} is {where}"
        )


def _fetch_from_hub(config: ModelConfig) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    from aioserve.support.progress import download_bars

    try:
        return Path(
            snapshot_download(
                config.model,
                revision=config.revision,
                tqdm_class=download_bars(),
                allow_patterns=["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "*.py"],
            )
        )
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"no directory {config.model!r} here, and the hub cannot be reached for a model of "
            f"that name: give a local path with --model, or check the network"
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ConfigError(f"cannot fetch model {config.model!r}: {one_line(error)}") from error


def read_same_model(config: ModelConfig, known: ModelInfo) -> ModelInfo:
    """Return the model that `config` names, which is to differ from `known` in its weights alone.
    Raises `ConfigError` that names what else is different.
    """
    info = ModelInfo(config)
    ours, theirs = known.hf_config.to_dict(), info.hf_config.to_dict()
    for name in sorted((ours.keys() | theirs.keys()) - _NOT_OF_THE_WEIGHTS):
        if ours.get(name) != theirs.get(name):
            raise ConfigError(
                f"{config.model} is another model than {known.config.model}: its {name} is "
                f"{theirs.get(name)!r}, not {ours.get(name)!r}"
            )
    return info


# Of a configuration: where it came from, and how files are written.
_NOT_OF_THE_WEIGHTS = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}
