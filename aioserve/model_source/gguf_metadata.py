"""What a GGUF file says of its architecture, and which of it has been asked for.

A key that a model may have and that is not asked for would be left out in silence, and its answers
would be wrong: what is left in the end is refused by name.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from aioserve.errors import ConfigError
from aioserve.model_source.stated_values import GGUF, check_stated

#: Keys of any architecture that change no token of a text: `vocab_size` repeats the rows of the
#: embedding, `pooling_type` is read with the file, `rope.dimension_sections` tells apart axes that
#: the positions of text have in common, the others say how the model came to be.
WITHOUT_EFFECT = (
    "vocab_size",
    "pooling_type",
    "rope.dimension_sections",
    "rope.scaling.finetuned",
    "tensor_data_layout",
)
#: Keys that change nothing where they are 0, as converters write them for models without the part.
_NONE_IF_ZERO = (
    "expert_count",
    "expert_used_count",
    "expert_shared_count",
    "expert_group_count",
    "expert_group_used_count",
    "nextn_predict_layers",
    "attention.sliding_window",
    "attention.max_alibi_bias",
    "attention.clamp_kqv",
    "attention.shared_kv_layers",
    "leading_dense_block_count",
)


class Metadata:
    """The keys under the name of a file's architecture, without that name."""

    def __init__(self, path: Path, architecture: str, metadata: Mapping[str, Any]) -> None:
        self._path = path
        prefix = f"{architecture}."
        self._values = {
            key.removeprefix(prefix): value
            for key, value in metadata.items()
            if key.startswith(prefix)
        }
        self._asked: set[str] = set()
        check_stated(str(path), self._values, GGUF)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, which thereby counts as read."""
        self._asked.add(key)
        return self._values.get(key, default)

    def need(self, key: str) -> Any:
        """The value of a key. Raises `ConfigError` if the file does not have it."""
        value = self.get(key)
        if value is None:
            raise ConfigError(f"{self._path} does not say {key}, which its architecture needs")
        return value

    def one(self, key: str, default: Any = None) -> Any:
        """The value of a key that may be stated for each layer, where all layers have the same.
        Raises `ConfigError` if they differ.
        """
        value = self.get(key, default)
        if not isinstance(value, list):
            return value
        if len(set(value)) != 1:
            raise self.refused(key, "layers that differ")
        return value[0]

    def each(self, key: str, num_layers: int) -> list[Any] | None:
        """The value of a key for each layer, where one value is that of all; None if it is not
        stated. Raises `ConfigError` for another number of values.
        """
        value = self.get(key)
        if value is None:
            return None
        values = value if isinstance(value, list) else [value] * num_layers
        if len(values) != num_layers:
            raise self.refused(key, f"{len(values)} values for {num_layers} layers")
        return values

    def expect(self, key: str, is_served: Callable[[Any], bool], served: str) -> None:
        """Raises `ConfigError` unless the key is absent or its value is served."""
        value = self.one(key)
        if value is not None and not is_served(value):
            raise self.refused(key, f"{value!r:.99} where {served} is served")

    def refused(self, key: str, why: str) -> ConfigError:
        """The error of a key whose value is not served."""
        return ConfigError(f"{self._path}: {key} has {why}")

    def refuse_unread(self) -> None:
        """Raises `ConfigError` that names the keys which were not asked for and may have effect."""
        unread = [
            key if key.isprintable() else repr(key)
            for key, value in self._values.items()
            if key not in self._asked
            and key not in WITHOUT_EFFECT
            and not (key in _NONE_IF_ZERO and not value)
        ]
        if unread:
            raise ConfigError(
                f"{self._path}: aioserve does not read its {', '.join(sorted(unread)):.499}, "
                "without which the answers may be another model's"
            )
