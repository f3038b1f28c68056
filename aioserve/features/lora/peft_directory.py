"""A PEFT directory: adapter_config.json and adapter_model.safetensors, read and checked.

Knows what LoRA is and what PEFT may write. Knows no base model: whether its modules are there, and
of these shapes, is checked where the adapter is put on one.
"""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from aioserve.errors import UNREADABLE, ConfigError, NoAdapterError, one_line
from aioserve.model_source.source import check_file

MAX_RANK = 256
PATTERN_SECONDS = 1.0  # for a pattern of the configuration to fit a name or not
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"

_PREFIX = "base_model.model."
# How PEFT calls the two factors, of linear modules and of embeddings, and the original weights that
# it saves beside those of embeddings and heads.
_KEY = re.compile(
    rf"{re.escape(_PREFIX)}(?P<module>.+?)\."
    r"(?:lora_(?P<linear>[AB])\.weight|lora_embedding_(?P<table>[AB])|(?P<base>base_layer\.weight))"
)
# Initial values that change the base model as well.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


class _PeftConfig(msgspec.Struct):
    """The fields of adapter_config.json that are read."""

    peft_type: str | None = None
    r: int = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    bias: str = "none"
    init_lora_weights: bool | str | None = True
    # What is refused unless it is off.
    use_dora: Any = None
    modules_to_save: Any = None
    trainable_token_indices: Any = None
    layer_replication: Any = None
    target_parameters: Any = None
    lora_bias: Any = None
    alora_invocation_tokens: Any = None
    use_qalora: Any = None
    use_bdlora: Any = None
    velora_config: Any = None
    monteclora_config: Any = None
    arrow_config: Any = None
    kasa_config: Any = None


_REFUSED = _PeftConfig.__struct_fields__[_PeftConfig.__struct_fields__.index("use_dora") :]


class LowRank(NamedTuple):
    """A product added to a weight [out, in]: `scale` * b @ a. Tensors as they are stored."""

    a: Any  # [rank, in]; of an embedding, in is the vocabulary
    b: Any  # [out, rank]
    scale: float


class AdapterFiles(NamedTuple):
    """An adapter as it lies on disk."""

    path: Path
    digest: str  # of both files: equal for equal weights
    modules: dict[str, LowRank]  # by the module's name in the base model
    embeddings: dict[str, LowRank]  # the same of embedding tables
    base_weights: dict[str, Any]  # [out, in], as the base is said to have them

    @property
    def rank(self) -> int:
        """The largest rank among the adapter's modules."""
        return max(len(part.a) for part in (*self.modules.values(), *self.embeddings.values()))

    @property
    def num_parameters(self) -> int:
        """How many parameters both factors of all modules have together."""
        parts = (*self.modules.values(), *self.embeddings.values())
        return sum(part.a.numel() + part.b.numel() for part in parts)


def stored_parameters(path: Path) -> int:
    """`num_parameters` of a directory, by the header of its file; 0 if that cannot be read, which
    `read_adapter` will say.
    """
    from safetensors import SafetensorError, safe_open

    if not (path / WEIGHTS_FILE).is_file():
        return 0
    try:
        with safe_open(path / WEIGHTS_FILE, framework="pt") as weights:
            return sum(
                math.prod(weights.get_slice(key).get_shape())
                for key in weights.keys()  # noqa: SIM118 - not a mapping
                if (match := _KEY.fullmatch(key)) and not match["base"]
            )
    except (SafetensorError, OSError):
        return 0


def read_adapter(path: Path, max_rank: int = MAX_RANK) -> AdapterFiles:
    """Read a directory. Raises `ConfigError` in one line for what is missing, damaged, not LoRA, or
    of a kind that is not served.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    config, config_bytes = _read_config(path / CONFIG_FILE)
    file = path / WEIGHTS_FILE
    check_file(file)
    if not file.is_file():
        raise NoAdapterError(f"no {WEIGHTS_FILE} in adapter directory {path}")
    found: dict[str, dict[str, Any]] = {}
    try:
        # Read once: the digest names cached prefixes, and must be that of these weights, even if
        # another process writes to the file meanwhile.
        weights_bytes = file.read_bytes()
        weights = load(weights_bytes)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"cannot read adapter weights {file}: {one_line(error)}") from error
    for key, tensor in weights.items():
        match = _KEY.fullmatch(key)
        if match is None:
            raise ConfigError(f"{file}: {key!r} is no weight of a LoRA adapter")
        kind = next(k for k in ("linear", "table", "base") if match[k])
        name = kind if kind == "base" else f"{kind} {match[kind]}"
        found.setdefault(match["module"], {})[name] = tensor
    with _named(file):
        digest = blake2b(config_bytes, digest_size=16)
        digest.update(weights_bytes)
        parts = AdapterFiles(path, digest.hexdigest(), {}, {}, {})
        for module, tensors in found.items():
            if (base := tensors.pop("base", None)) is not None:
                parts.base_weights[module] = base
            for kind, target in (("linear", parts.modules), ("table", parts.embeddings)):
                pair = [tensors.pop(f"{kind} {side}", None) for side in "AB"]
                if any(side is not None for side in pair):
                    target[module] = _low_rank(module, pair, config, max_rank)
        if not (parts.modules or parts.embeddings):
            raise ConfigError("it adapts nothing")
    return parts


def _read_config(file: Path) -> tuple[_PeftConfig, bytes]:
    """Return what it says, and the bytes in which it does."""
    check_file(file)
    try:
        content = file.read_bytes()
        config = msgspec.json.decode(content, type=_PeftConfig)
    except FileNotFoundError:
        where = f"directory {file.parent}" if file.parent.is_dir() else f"{file.parent}"
        raise NoAdapterError(f"no {CONFIG_FILE} in adapter {where}") from None
    except (OSError, *UNREADABLE) as error:
        raise ConfigError(f"cannot read {file}: {one_line(error)}") from error
    with _named(file):
        if config.peft_type != "LORA":
            raise ConfigError(f"adapters of type {config.peft_type} are not served: only LORA")
        if config.bias != "none":
            raise ConfigError(f"bias is {config.bias!r}: adapters with biases are not served")
        for name in _REFUSED:
            if getattr(config, name):
                raise ConfigError(f"{name} is set: such adapters are not served")
        if str(config.init_lora_weights).startswith(_CHANGES_BASE):
            raise ConfigError(
                f"init_lora_weights is {config.init_lora_weights!r}, which changes the base model: "
                "save the adapter with path_initial_model_for_weight_conversion"
            )
    return config, content


def _low_rank(module: str, pair: Sequence[Any], config: _PeftConfig, max_rank: int) -> LowRank:
    a, b = pair
    if a is None or b is None:
        raise ConfigError(f"of {module} there is lora_{'A' if b is None else 'B'} alone")
    rank = _of_pattern(config.rank_pattern, module, config.r)
    if a.dim() != 2 or b.dim() != 2 or len(a) != rank or b.shape[1] != rank:
        raise ConfigError(
            f"{module} has lora_A {list(a.shape)} and lora_B {list(b.shape)}, which are not of "
            f"rank {rank}, as {CONFIG_FILE} says"
        )
    if not 1 <= rank <= max_rank:
        raise ConfigError(f"{module} has rank {rank}: adapters of rank 1 to {max_rank} are served")
    if not (a.isfinite().all() and b.isfinite().all()):
        raise ConfigError(f"{module} has numbers that are not finite")
    alpha = _of_pattern(config.alpha_pattern, module, config.lora_alpha)
    return LowRank(a, b, alpha / (math.sqrt(rank) if config.use_rslora else rank))


def _of_pattern(pattern: dict[str, Any] | None, module: str, default: Any) -> Any:
    """Return what the first key that fits the end of a module's name says, as in PEFT."""
    import regex  # unlike `re`, it can be told to end

    for key, value in (pattern or {}).items():
        try:
            if regex.match(rf"(.*\.)?({key})$", module, timeout=PATTERN_SECONDS):
                return value
        except (regex.error, RecursionError) as error:
            raise ConfigError(
                f"the pattern {key[:99]!r} is no regular expression: {one_line(error)}"
            ) from error
        except TimeoutError:
            raise ConfigError(
                f"the pattern {key[:99]!r} takes more than {PATTERN_SECONDS:g} s for {module}"
            ) from None
    return default


@contextmanager
def _named(file: Path) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"adapter {file.parent}: {error}") from None
