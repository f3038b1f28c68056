"""The face of a model on disk, for callers that need its facts, its tokenizer or its weights.

Knows no format. What takes seconds to import is imported by the methods that need it.
"""

import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import msgspec

from aioserve.errors import UNREADABLE, ConfigError, one_line
from aioserve.params import SamplingDefaults
from aioserve.support.parts import Brought

T = TypeVar("T")

# What may stand where a file is read, and would be waited for or read without an end.
_NO_FILES = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class Rounding(NamedTuple):
    """Formats of quantized weights that matrices are rounded to as they are loaded."""

    inner: str
    outer: str  # embedding and head


class ModelSource(ABC):
    """One model at `path`. All of it raises `ConfigError` in one line that names a bad file."""

    packs_embedding: ClassVar[bool] = False  # whether what it keeps in blocks includes that

    def __init__(self, path: Path, *, trust_remote_code: bool = False) -> None:
        self.path = path
        self.trust_remote_code = trust_remote_code

    @property
    @abstractmethod
    def known_config(self) -> Mapping[str, Any]:
        """Fields of the text model's configuration, by the names of `transformers`, that can be
        told without it; what is missing is asked of `read_config`.
        """

    @property
    def model_type(self) -> str:
        """The `model_type` that `transformers` has for the whole model."""
        return str(self.known_config.get("model_type", ""))

    @property
    @abstractmethod
    def stated_eos(self) -> tuple[int, ...] | None:
        """Tokens that end a reply, where that is said apart from the configuration; else None."""

    @property
    @abstractmethod
    def stated_pooling(self) -> str | None:
        """How the model was saved to make one vector of a prompt: `mean`, `last`, or in words what
        is neither; None if that is not said.
        """

    @property
    @abstractmethod
    def stated_sampling(self) -> SamplingDefaults:
        """How the model recommends to sample its replies."""

    @abstractmethod
    def read_config(self) -> Any:
        """Return the whole `transformers` configuration; the text model may be a part of it."""

    @abstractmethod
    def read_tokenizer(self) -> Any:
        """Return the `transformers` tokenizer, with the chat template if there is one."""

    @abstractmethod
    def num_bytes(
        self, itemsize: int, *, keeps_blocks: bool = False, rounding: Rounding | None = None
    ) -> float:
        """Return what its weights take in memory, by the headers of their files: `itemsize` each,
        but for those that `load_module`, told the same, leaves in fewer bits.
        """

    @abstractmethod
    def load_module(
        self,
        dtype: Any,
        device: Any,
        attn_implementation: str | None,
        *,
        keeps_blocks: bool = False,
        rounding: Rounding | None = None,
    ) -> Any:
        """Return the causal language model of `transformers` with all its weights, as `dtype`, a
        `torch.dtype`, at `device`, a `torch.device`; no `attn_implementation`: what it has by
        default. With `keeps_blocks`, what is stored in few bits stays so: a `QuantizedWeight` is
        `attached` to its parameter, which only stands in for it; so is, with `rounding`, what is
        rounded.
        """

    @property
    def is_quantized(self) -> bool:
        """Whether the model's files may have quantized weights."""
        return False

    def stored_kinds(self, outline: Any) -> Mapping[str, str]:
        """Return the formats of quantized weights that `load_module` may leave as they are, by the
        names of the parameters of `outline`, the causal language model without its weights.
        """
        del outline
        return {}

    def quantize(self, module: Any, rounding: Rounding) -> None:
        """Round what `load_module` has left of `module` as numbers, and free these. Raises
        `ConfigError` for a layer that does not fit the groups.
        """
        raise ConfigError(f"the weights of {self.path} are served in the types that they have")

    def open_weights(self) -> AbstractContextManager[Mapping[str, Callable[[], Any]]]:
        """Return all stored weights by the names in the files, each read, unpacked, when it is
        called.
        """
        raise ConfigError(
            f"{self.path} is not read weight by weight, as an MTP layer is: it must be a directory "
            "with *.safetensors files"
        )

    def load_seeing_module(self, dtype: Any, device: Any, attn_implementation: str) -> Any:
        """Return the vision-language model as `dtype` at `device`; its text has
        `attn_implementation`.
        """
        raise ConfigError(f"{self.path} holds no model that sees")


def check_file(path: Path) -> None:
    """Raises `ConfigError` for what is there and can be no file; whether one is there, and can be
    read, is found by the code that opens it.
    """
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
    except (OSError, ValueError):
        return
    if kind in _NO_FILES:
        raise ConfigError(f"{path} is {_NO_FILES[kind]}, not a file")


def read_json(path: Path, kind: type[T]) -> T:
    """Return what the file says. Raises `ConfigError` in one line if that is not of the kind."""
    check_file(path)
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, *UNREADABLE) as error:
        raise ConfigError(f"cannot read {path}: {one_line(error)}") from error


class NoAttentionInterfaceError(ConfigError):
    """Modules of this architecture know some implementations of attention, and not the one given.

    Falcon, GPT-J and GPT-Neo.
    """


def not_loaded(path: Path, error: Exception, attn_implementation: str | None) -> ConfigError:
    """Return what is wrong with a model whose module `transformers` could not make."""
    if isinstance(error, KeyError) and attn_implementation in error.args:
        return NoAttentionInterfaceError(f"{path} does not use transformers' attention interface")
    return ConfigError(f"cannot load the model in {path}: {one_line(error)}")


class OpenSource(Protocol):
    """A function that opens a model of one kind on disk. Raises `ConfigError` if no model can come
    of it.
    """

    def __call__(self, path: Path, *, trust_remote_code: bool = False) -> ModelSource: ...


#: The kinds of models on disk that parts bring, beside plain directories.
KINDS = Brought[OpenSource]("model sources")
