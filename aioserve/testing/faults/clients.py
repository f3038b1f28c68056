"""Clients on raw sockets: one that reads to the end, and those that reset, half-close, stall or
flood.

Know HTTP/1.1 as far as the server speaks it. Every one of them has an end within a bound.
"""

import asyncio
import json
import socket
import struct
from contextlib import suppress
from typing import Any

import msgspec

#: How a client behaves.
CLIENTS = ("streams", "whole", "resets", "half-closes", "stalls", "floods", "leaves")
#: Those whose answers are read to their ends.
READERS = ("streams", "whole")
NUM_FLOOD = 24  # requests of one that floods
STALL_BYTES = 4096  # of the socket of one that stalls


class Told(msgspec.Struct):
    """The answers to a client up to its end."""

    status: int = 0  # 0: the connection ended without an answer
    texts: dict[int, str] = {}  # by choice
    finish_reasons: dict[int, str] = {}  # by choice, of those that have ended
    error: str = ""
    is_whole: bool = False  # the answer ended as answers do

    @property
    def is_served(self) -> bool:
        """Whether it got all that it asked for."""
        ends = self.finish_reasons
        is_good = bool(ends) and ends.keys() == self.texts.keys()
        is_good = is_good and set(ends.values()) <= {"length", "stop"}
        return self.is_whole and is_good and not self.error


class Client:
    """One request on a connection of its own."""

    def __init__(self, host: str, port: int, kind: str, body: dict[str, Any]) -> None:
        """`body` is that of a completion, or of a chat completion if it has messages; the kind
        decides whether it is streamed.
        """
        self.kind, self.body = kind, {**body, "stream": kind != "whole"}
        self._host, self._port = host, port
        self.told = Told()

    async def run(self) -> Told:
        """To its end: what it was told."""
        data = json.dumps(self.body).encode()
        path = "/v1/chat/completions" if "messages" in self.body else "/v1/completions"
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        ).encode()
        sock = socket.socket()
        if self.kind == "stalls":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, STALL_BYTES)
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, (self._host, self._port))
            reader, writer = await asyncio.open_connection(sock=sock)
        except OSError:
            sock.close()
            return self.told
        try:
            writer.write((head + data) * (NUM_FLOOD if self.kind == "floods" else 1))
            await self._behave(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass  # the server has ended it: that is an end
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
        return self.told

    async def _behave(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.kind == "half-closes":
            writer.write_eof()
        if self.kind in ("resets", "floods", "leaves"):
            with suppress(asyncio.IncompleteReadError):
                await reader.readuntil(b"\r\n\r\n")
            if self.kind != "leaves":  # a reset, as a process that is killed leaves one
                sock = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return
        if self.kind == "stalls":
            with suppress(asyncio.IncompleteReadError):
                await reader.readuntil(b"\r\n")
            return
        await self._read(reader)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.told.status = int(head.split()[1])
        fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
        if "content-length" in fields:
            self._take(await reader.readexactly(int(fields["content-length"])))
            self.told.is_whole = True
            return
        buffer = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            buffer += (await reader.readexactly(size + 2))[:-2]
            *events, buffer = buffer.split(b"\n\n")
            for event in events:
                self._take(event.removeprefix(b"data: "))
        self.told.is_whole = True

    def _take(self, data: bytes) -> None:
        if data == b"[DONE]":
            return
        try:
            found = json.loads(data)
        except ValueError:  # a text, as aiohttp answers where a server of its own fails
            self.told.error = data.decode()
            return
        if error := found.get("error"):
            self.told.error = error["message"]
            return
        for choice in found["choices"]:
            said = choice.get("delta") or choice.get("message") or {}
            text = choice["text"] if "text" in choice else said.get("content") or ""
            index = choice["index"]
            self.told.texts[index] = self.told.texts.get(index, "") + text
            if reason := choice["finish_reason"]:
                self.told.finish_reasons[index] = reason
