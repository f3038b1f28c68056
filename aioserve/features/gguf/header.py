"""The head of a GGUF file: its metadata, and where which tensor lies, in one file or in several.

Reads bytes, in order, and checks every length before it is used. Knows no architecture, and skips
the words of the vocabulary, which `transformers` reads.
"""

import math
import mmap
import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

from aioserve.errors import ConfigError, one_line

# Value types of the format, by number, as `struct` writes them; the others are:
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_FORMATS[12] = "d"
_STRING, _ARRAY = 8, 9

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32


class Tensor(NamedTuple):
    """The entry of one tensor in the header of a GGUF file."""

    name: str
    shape: tuple[int, ...]  # as in torch: the dimension that lies together is last
    type_id: int  # of `gguf.GGMLQuantizationType`
    offset: int  # bytes, from the start of the file
    num_bytes: int
    path: Path  # of the file that holds it

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


class Header(NamedTuple):
    """All but the weights. Of an array of strings `metadata` has the length."""

    metadata: dict[str, Any]
    tensors: tuple[Tensor, ...]


def read_header(path: Path) -> Header:
    """Raises `ConfigError` in one line if this is no GGUF file, or not all of one."""
    try:
        with path.open("rb") as file:
            if file.read(4) != MAGIC:
                raise ConfigError(
                    f"{path} is not a GGUF file: a model is a Hugging Face directory or a GGUF file"
                )
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data).read()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


class _Reader:
    """A reader of the header of a GGUF file, from its beginning to its end, once."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._at = len(MAGIC)

    def read(self) -> Header:
        (version,) = self._unpack("I")
        if version not in VERSIONS:
            raise ConfigError(
                f"{self._path} is GGUF of version {version}; read are versions 2 and 3 (little "
                "endian)"
            )
        num_tensors, num_keys = self._unpack("QQ")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            metadata[key] = self._value(*self._unpack("I"))
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ConfigError(f"{self._path} is damaged: general.alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        return Header(metadata, tuple(self._tensor(start, *entry) for entry in entries))

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (num_dimensions,) = self._unpack("I")
        shape = self._unpack("Q", num_dimensions)[::-1]
        type_id, offset = self._unpack("IQ")
        return name, shape, type_id, offset

    def _tensor(
        self, start: int, name: str, shape: tuple[int, ...], type_id: int, offset: int
    ) -> Tensor:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            per_block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(type_id)]
        except (ValueError, KeyError):
            raise ConfigError(
                f"{self._path}: tensor {name!r} is stored as type {type_id}, which the package "
                "gguf does not know"
            ) from None
        num_elements = math.prod(shape)
        if not shape or num_elements < 1 or shape[-1] % per_block:
            raise ConfigError(f"{self._path} is damaged: tensor {name!r} has the shape {shape}")
        num_bytes = num_elements // per_block * block_bytes
        self._check(start + offset, num_bytes)
        return Tensor(name, shape, type_id, start + offset, num_bytes, self._path)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._unpack(self._format(kind))[0]
        element, count = self._unpack("IQ")
        if element != _STRING:
            return list(self._unpack(self._format(element), count))
        for _ in range(count):
            (length,) = self._unpack("Q")
            self._check(self._at, length)
            self._at += length
        return count

    def _format(self, kind: int) -> str:
        if kind not in _FORMATS:
            raise ConfigError(f"{self._path} is damaged: a value of type {kind}")
        return _FORMATS[kind]

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        self._check(self._at, length)
        self._at += length
        return self._data[self._at - length : self._at].decode("utf-8", "replace")

    def _unpack(self, form: str, count: int = 1) -> tuple[Any, ...]:
        size = count * struct.calcsize(f"<{form}")
        self._check(self._at, size)
        self._at += size
        form = form if count == 1 else f"{count}{form}"
        return struct.unpack_from(f"<{form}", self._data, self._at - size)

    def _check(self, at: int, size: int) -> None:
        if at + size > self._size:
            raise ConfigError(
                f"{self._path} is cut short or damaged: it has {self._size:,} bytes, and its "
                f"header asks for {at + size:,} or more"
            )


# A GGUF model in several files, as llama-gguf-split writes them: NAME-00001-of-00003.gguf. The
# first has the metadata of the model, each a part of its tensors.


_NUMBERS = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


def read_parts(path: Path, header: Header) -> Header:
    """Return the header of the whole model whose first file is `path`. Raises `ConfigError` that
    names a file which is not the first, or is missing.
    """
    count = header.metadata.get("split.count", 1)
    if count <= 1:
        return header
    number = header.metadata.get("split.no", 0)
    if not (named := _NUMBERS.search(path.name)):
        raise ConfigError(
            f"{path} is part {number + 1} of {count} and not named so: its name has to end with "
            f"-{number + 1:05}-of-{count:05}.gguf, for the others to be found"
        )
    base = path.name[: named.start()]
    files = [path.with_name(f"{base}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    if number != 0:
        raise ConfigError(f"{path} is part {number + 1} of {count}: name the first, {files[0]}")
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise ConfigError(f"{path} is part 1 of {count}, and beside it is no {missing[0]}")
    tensors = list(header.tensors)
    for index, file in enumerate(files[1:], start=1):
        part = read_header(file)
        stated = part.metadata.get("split.no"), part.metadata.get("split.count")
        if stated != (index, count):
            raise ConfigError(
                f"{file} says that it is part {stated[0]} of {stated[1]}, counted from 0; expected "
                f"is part {index} of {count}"
            )
        tensors += part.tensors
    total = header.metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise ConfigError(f"{path} and its parts hold {len(tensors)} of {total} tensors")
    return header._replace(tensors=tuple(tensors))


# Tensors of a GGUF file: their bytes, and the numbers that these mean.


_PIECE = 1 << 20  # weights that are unpacked at a time


def read_bytes(tensor: Tensor) -> Any:
    """Return the bytes of a tensor as a numpy array."""
    import numpy as np

    return np.fromfile(tensor.path, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset)


def unpack(tensor: Tensor) -> Any:
    """Return the weights of a tensor as float32, a numpy array of its shape. Raises `ConfigError`
    for a type that cannot be unpacked.
    """
    import numpy as np
    from gguf import GGMLQuantizationType, dequantize

    kind = GGMLQuantizationType(tensor.type_id)
    row_bytes = tensor.num_bytes * tensor.shape[-1] // tensor.num_elements
    rows = read_bytes(tensor).reshape(-1, row_bytes)
    weights = np.empty((len(rows), tensor.shape[-1]), dtype=np.float32)
    step = max(1, _PIECE // tensor.shape[-1])  # `dequantize` takes several times what it returns
    try:
        for start in range(0, len(rows), step):
            piece = slice(start, start + step)
            weights[piece] = dequantize(rows[piece], kind)
    except NotImplementedError as error:
        raise ConfigError(
            f"{tensor.path}: tensor {tensor.name} is {kind.name}, which cannot be unpacked: "
            f"{one_line(error)}"
        ) from None
    return weights.reshape(tensor.shape)
