"""Bodies with something wrong at every place, and what a refusal must look like.

Good and bad values of the numbers of `RANGES` follow from their ranges: a new one has them.
"""

import sys
from collections.abc import Iterable
from typing import Any

from msgspec.structs import fields

from aioserve.params import RANGES, SamplingParams
from aioserve.server.protocol import GenerationRequest
from tests.slow import examples

#: The numbers that every route with the fields of completions and chats takes, and their ranges.
NUMBERS = {n: r for n, r in RANGES.items() if n in GenerationRequest.__struct_fields__}
_FLOATS = {field.name for field in fields(SamplingParams) if field.type is float}


def good_numbers() -> dict[str, float]:
    """A value of each of the numbers that is in its range, and not its default."""
    found: dict[str, float] = {}
    for name, numbers in NUMBERS.items():
        step = min(0.25, (numbers.le - numbers.ge) / 8) if name in _FLOATS else 1
        value = numbers.ge + step
        found[name] = value if numbers.holds(value) else numbers.ge
    return found


def bad_numbers() -> list[tuple[dict[str, float], str]]:
    """Values just outside of each range, each as a field, with the name of the field."""
    found = []
    for name, numbers in NUMBERS.items():
        most = () if numbers.le == sys.float_info.max else (numbers.le + 1,)
        hole = () if numbers.other_than is None else (numbers.other_than,)
        found += [({name: value}, name) for value in (numbers.ge - 1, *most, *hole)]
    return found


BIG = 10**400
WRONG = [None, True, -1, 0, 2.5, BIG, "", "x" * 9, "\x00", [], [[]], [{}], {}, {"a": {"b": []}}]


def check(answer, status=400):
    """The body is an error of OpenAI's shape, of Anthropic's or of Ollama's; returns it."""
    assert answer.status == status
    assert answer.headers["Content-Type"].startswith("application/json")
    body = answer.json()
    error = body["error"]
    if "type" in body:
        assert body == {"type": "error", "error": error}
        assert error.keys() - {"details"} == {"type", "message"}
    elif isinstance(error, str):
        assert body == {"error": error}
        return {"message": error}
    else:
        assert body.keys() == {"error"}
        assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in error["message"]
    return error


def mutations(value):
    """`value` with one thing wrong, or at least odd, at every place."""
    yield from WRONG
    if isinstance(value, dict):
        yield {**value, "zzz": 1}
        for name, item in value.items():
            yield {k: v for k, v in value.items() if k != name}
            yield from ({**value, name: wrong} for wrong in mutations(item))
    if isinstance(value, list):
        for i, item in enumerate(value):
            yield from ([*value[:i], wrong, *value[i + 1 :]] for wrong in mutations(item))


def thinned(bodies: Iterable[Any]) -> list[Any]:
    """All of them; in `make test` one of three, in which each of `WRONG` is somewhere."""
    return [*bodies][:: examples(3, slow=1)]
