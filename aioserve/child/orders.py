"""What a program tells its engine's process when that begins, in bytes.

Knows the settings' structs. Knows neither processes nor sockets.
"""

from typing import IO

import msgspec

from aioserve.config import EngineConfig

_LENGTH_BYTES = 8


class Orders(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to serve, and what to clear away afterwards."""

    config: EngineConfig
    own_folder: str | None = None  # made for the socket alone; empty once the server has ended


def send(pipe: IO[bytes], orders: Orders) -> None:
    """Write them, and leave the pipe open. Raises `OSError`."""
    data = msgspec.msgpack.encode(orders)
    pipe.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)
    pipe.flush()


def receive(pipe: IO[bytes]) -> Orders:
    """Read them, and not a byte more. Raises `EOFError` if the writer ended before the last one."""
    length = int.from_bytes(_read(pipe, _LENGTH_BYTES), "big")
    return msgspec.msgpack.decode(_read(pipe, length), type=Orders)


def _read(pipe: IO[bytes], length: int) -> bytes:
    data = b""
    while len(data) < length:  # a pipe gives what there is
        if not (more := pipe.read(length - len(data))):
            raise EOFError("the program that wanted an engine ended before it had said which")
        data += more
    return data
