"""Makes cases of other cases: bytes that are changed, and JSON whose values are.

Knows what tends to hurt readers: limits of numbers, depth, length, text that is none. Knows no
target.
"""

import json
import random
import re
from collections.abc import Sequence
from typing import Any

VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e-50, 1e39, 1e308, float("inf"), float("nan")),
    *(2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 10**400),
    *("", " ", "0", "x" * 5000, "\0", "\ud800", "ä", "\U0001f3ad", "../..", "/dev/null", "null"),
    *([], {}, [[]], [None], [0], {"": None}, {"type": "object"}, [1, "x", None], [-1] * 300),
]
NUMBERS = [b"0", b"-1", b"1e999", b"99999999999999999999", b"1.5", b"0x10", b"-0", b"1_0", b"NaN"]
BYTES = [0, 1, 9, 10, 13, 32, 34, 39, 58, 91, 92, 93, 123, 125, 127, 128, 192, 237, 244, 255]
PIECES = [b"\0", b"\r\n", b"\n\n", b'"', b"\\", b"\xff\xfe", b"\xed\xa0\x80", b"\xef\xbb\xbf"]
PIECES += [b"[" * 3000, b'{"a":' * 3000, b"(" * 3000, b"%s%n", b"&a [*a,*a]", b"!!python/object:x"]


class Mutator:
    """Draws by a seed: the same cases for the same corpus."""

    def __init__(self, seed: int | str, words: Sequence[bytes] = (), focus: int | None = None):
        """`words` mean something to the target; what is after `focus` bytes means little."""
        self.rng = random.Random(seed)
        self._pieces = [*PIECES, *words, *words]
        self._focus = focus

    def mutated(self, data: bytes, other: bytes) -> bytes:
        """A case like `data`, and perhaps in part like `other`."""
        rng = self.rng
        for _ in range(min(int(rng.expovariate(0.7)) + 1, 8)):
            if rng.random() < 0.5 and (changed := self._in_json(data)) is not None:
                data = changed
            else:
                data = rng.choice(_WAYS)(self, data, other)
        return data[: 2**20]

    def _at(self, data: bytes) -> int:
        end = len(data) if self._focus is None else min(self._focus, len(data))
        return self.rng.randint(0, end)

    def _span(self, data: bytes) -> tuple[int, int]:
        start = self._at(data)
        return start, min(len(data), start + int(self.rng.expovariate(1 / 12)) + 1)

    def set_byte(self, data: bytes, other: bytes) -> bytes:
        start = self._at(data)
        value = self.rng.choice([*BYTES, self.rng.randrange(256)])
        return data[:start] + bytes([value]) + data[start + 1 :]

    def flip(self, data: bytes, other: bytes) -> bytes:
        start = self._at(data)
        changed = bytes(byte ^ 1 << self.rng.randrange(8) for byte in data[start : start + 1])
        return data[:start] + changed + data[start + 1 :]

    def delete(self, data: bytes, other: bytes) -> bytes:
        start, end = self._span(data)
        return data[:start] + data[end:]

    def double(self, data: bytes, other: bytes) -> bytes:
        start, end = self._span(data)
        return data[:end] + data[start:end] * self.rng.choice([1, 1, 2, 50]) + data[end:]

    def insert(self, data: bytes, other: bytes) -> bytes:
        start = self._at(data)
        return data[:start] + self.rng.choice(self._pieces) + data[start:]

    def cut(self, data: bytes, other: bytes) -> bytes:
        return data[: self._at(data)]

    def splice(self, data: bytes, other: bytes) -> bytes:
        return data[: self._at(data)] + other[self._at(other) :]

    def number(self, data: bytes, other: bytes) -> bytes:
        found = list(re.finditer(rb"-?\d+(\.\d+)?", data[: self._focus]))
        if not found:
            return self.insert(data, other)
        match = self.rng.choice(found)
        return data[: match.start()] + self.rng.choice(NUMBERS) + data[match.end() :]

    def word(self, data: bytes, other: bytes) -> bytes:
        """One word of the text becomes another one of it."""
        found = list(re.finditer(rb"\w+", data[: self._focus]))
        if len(found) < 2:
            return self.insert(data, other)
        one, another = self.rng.sample(found, 2)
        return data[: one.start()] + another[0] + data[one.end() :]

    def _in_json(self, data: bytes) -> bytes | None:
        """With a value changed, removed, doubled or wrapped; None if it is no JSON."""
        start = data.find(b"\r\n\r\n") + 4 if b" HTTP/1." in data[:200] else 0
        head, body = data[:start], data[start:]
        try:
            tree = json.loads(body)
        except (ValueError, RecursionError):
            return None
        places: list[tuple[Any, Any]] = []
        to_visit = [tree] if isinstance(tree, dict | list) else []
        while to_visit:
            node = to_visit.pop()
            keys = list(node) if isinstance(node, dict) else range(len(node))
            for key in keys:
                places.append((node, key))
                if isinstance(node[key], dict | list):
                    to_visit.append(node[key])
            if len(places) > 20_000:
                break
        if not places:
            tree = self._value(tree)
        else:
            node, key = self.rng.choice(places)
            way = self.rng.randrange(8)
            if way == 0:
                del node[key]
            elif way == 1 and isinstance(node, dict):
                node[self.rng.choice(["", "x", *map(str, self.rng.choice(places)[1:])])] = node[key]
            elif way == 2:
                _, other = self.rng.choice(places)
                node[key] = other
            else:
                node[key] = self._value(node[key])
        try:
            body = json.dumps(tree).encode()
        except (ValueError, RecursionError):  # it has come to hold itself
            return None
        if head:
            head = re.sub(rb"(?i)content-length: \d+", b"Content-Length: %d" % len(body), head)
        return head + body

    def _value(self, value: Any) -> Any:
        way = self.rng.randrange(5)
        if way == 0:
            return [value]
        if way == 1:
            return {"type": value}
        if way == 2 and isinstance(value, int | float) and value == value:
            return self.rng.choice(
                [
                    -value,
                    value * 2**40,
                    value + 1,
                    value % 7,
                    -value * 1e3 if abs(value) < 1e9 else 0,
                ]
            )
        if way == 3:
            for _ in range(self.rng.choice([10, 500])):
                value = [value] if self.rng.random() < 0.5 else {"items": value}
        return self.rng.choice(VALUES) if way == 4 else value if way == 3 else self._value(value)


_WAYS = [
    *(Mutator.set_byte, Mutator.flip, Mutator.delete, Mutator.double, Mutator.insert),
    *(Mutator.cut, Mutator.splice, Mutator.number, Mutator.word, Mutator.word),
]
