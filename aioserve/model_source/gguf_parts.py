"""A GGUF model in several files, as llama-gguf-split writes them: NAME-00001-of-00003.gguf.

The first has the metadata of the model, each a part of its tensors.
"""

import re
from pathlib import Path

from aioserve.errors import ConfigError
from aioserve.model_source.gguf_header import Header, read_header

_NUMBERS = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


def read_parts(path: Path, header: Header) -> Header:
    """The header of the whole model whose first file is `path`. Raises `ConfigError` that names a
    file which is not the first, or is missing.
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
