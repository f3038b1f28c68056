"""What a model directory says about itself: limits, EOS tokens, tokenizer, chat template.

Knows nothing about weights. The engine's door and the runner's loader read the same facts here.
"""

import logging
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from aioserve.config import EMBEDDED_MODEL, ModelConfig
from aioserve.errors import ConfigError

logger = logging.getLogger(__name__)

# A model that states no limit (or an absurd one) is served to this length, in tokens.
FALLBACK_MAX_MODEL_LEN = 2048

# Where config.json may describe the text model of a larger one, as `get_text_config` looks for it.
TEXT_PARTS = ("decoder", "generator", "text_config")


class GenerationConfig(msgspec.Struct):
    """What is read of generation_config.json."""

    eos_token_id: int | list[int] | None = None


class ModelInfo:
    """Facts of one resolved model directory. Raises `ConfigError` if it cannot be read."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.path = resolve_model_path(config)

    @cached_property
    def _config_json(self) -> dict[str, Any]:
        """What config.json says; nothing if the text model is described somewhere inside of it."""
        path = self.path / "config.json"
        try:
            config = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"cannot read {path}: {error}") from error
        return {} if any(isinstance(config.get(part), dict) for part in TEXT_PARTS) else config

    def _read(self, name: str) -> Any:
        """A value of the configuration. `transformers`, which takes seconds to import, is asked
        only for what the file leaves out.
        """
        value = self._config_json.get(name)
        return getattr(self.hf_config, name, None) if value is None else value

    @cached_property
    def hf_config(self) -> Any:
        """The text model's `transformers` configuration."""
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(
                self.path, trust_remote_code=self.config.trust_remote_code
            )
        except Exception as error:  # transformers raises whatever the file provokes
            raise ConfigError(
                f"cannot read {self.path / 'config.json'}: {_one_line(error)}"
            ) from error
        return config.get_text_config(decoder=True)

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a reply: generation_config.json, else config.json."""
        eos: int | list[int] | None = None
        path = self.path / "generation_config.json"
        if path.is_file():
            try:
                eos = msgspec.json.decode(path.read_bytes(), type=GenerationConfig).eos_token_id
            except (OSError, msgspec.DecodeError) as error:
                raise ConfigError(f"cannot read {path}: {error}") from error
        if eos is None:
            eos = self._read("eos_token_id")
        if eos is None:
            return ()
        return (eos,) if isinstance(eos, int) else tuple(eos)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding: token ids from 0 to one less."""
        return int(self._read("vocab_size"))

    @cached_property
    def max_model_len(self) -> int:
        """Prompt and output together, in tokens: the setting, else what the model states."""
        if self.config.max_model_len is not None:
            return self.config.max_model_len
        return int(self._num_positions or FALLBACK_MAX_MODEL_LEN)

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
        limit: int | None = self._read("max_position_embeddings")
        return limit

    @cached_property
    def tokenizer(self) -> Any:
        """The `transformers` tokenizer. Raises `ConfigError`, also if it was not wanted."""
        if self.config.skip_tokenizer_init:
            raise ConfigError("text needs the tokenizer, but skip_tokenizer_init is set")
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(
                self.path, trust_remote_code=self.config.trust_remote_code
            )
        except Exception as error:
            raise ConfigError(
                f"cannot read the tokenizer of {self.path}: {_one_line(error)}"
            ) from error


def resolve_model_path(config: ModelConfig) -> Path:
    """The directory of the model: shipped with the package, local, or fetched from the hub."""
    path = Path(config.model).expanduser()
    is_embedded = config.model == EMBEDDED_MODEL
    if config.revision is not None and (is_embedded or path.is_dir()):
        where = "shipped with aioserve" if is_embedded else "a local directory"
        raise ConfigError(
            f"model.revision is {config.revision!r}, which has no effect: {config.model} is {where}"
        )
    if is_embedded:
        return Path(__file__).parent / "embedded"
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"no config.json in model directory {path}")
        return path
    is_hub_name = config.model.count("/") <= 1 and not config.model.startswith((".", "/", "~"))
    if path.exists() or not is_hub_name:
        raise ConfigError(f"no model directory at {config.model}")
    return _fetch_from_hub(config)


def _fetch_from_hub(config: ModelConfig) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                config.model,
                revision=config.revision,
                allow_patterns=["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "*.py"],
            )
        )
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"no directory {config.model!r} here, and the hub cannot be reached for a model of "
            f"that name: give a local path with --model, or check the network"
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ConfigError(f"cannot fetch model {config.model!r}: {_one_line(error)}") from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
