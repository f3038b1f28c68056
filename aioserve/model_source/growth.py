"""Refuses a tokenizer whose steps lengthen a text until a request would never end.

`tokenizer.json` may replace texts by longer ones, one step after another: thirty that double a
letter make a gigabyte of it, in one call that nothing can end. Knows the steps of `tokenizers`
that prompts go through before they are cut into tokens, and replies after. Knows no vocabulary.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from aioserve.errors import ConfigError, is_panic

#: How many characters a tokenizer may make of one. Unicode's normal forms make 18 at most.
MAX_GROWTH = 64
_SAMPLE = 256  # characters of each text that is tried: what stands before it or behind is no growth
# What may stand for much text in a pattern of a step, beside the letters that are in it.
_USUAL = (" ", "\n", "a", "A", "1", ".", "\u2581")

_EMPTY = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}


class _Stated(msgspec.Struct):
    """The fields of a tokenizer.json that are read."""

    normalizer: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None


def check_growth(path: Path) -> None:
    """Raises `ConfigError` if the steps of this tokenizer.json make more than `MAX_GROWTH`
    characters of one. What cannot be read is left to the library, which says why.
    """
    try:
        stated = msgspec.json.decode(path.read_bytes(), type=_Stated)
    except (OSError, msgspec.DecodeError):
        return
    for kind, given in (("normalizer", stated.normalizer), ("decoder", stated.decoder)):
        steps = list(_steps(given))
        texts = sorted({text for step in steps for text in _texts(step)})
        if not texts:
            continue  # only a text of its own can make a step repeat itself
        try:
            made = [_applied(kind, step) for step in steps]
        except Exception:  # whatever the library raises; it is raised again by who loads it
            return
        for text in {*texts, *"".join(texts), *_USUAL}:
            _check(path, kind, made, text)


def _check(path: Path, kind: str, steps: list[Callable[[str], str]], text: str) -> None:
    made = text * -(-_SAMPLE // len(text))
    most = MAX_GROWTH * len(made)
    for number, step in enumerate(steps, start=1):
        try:
            made = step(made)
        except BaseException as error:
            if not is_panic(error):
                raise
            return  # it cannot read this text, and a request with such a one is refused
        if len(made) > most:
            raise ConfigError(
                f"the {kind} of {path} makes more than {MAX_GROWTH} characters of one by its step "
                f"{number}, as of {text[:20]!r}: a request could take for ever"
            )


def _steps(given: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield one after another, out of all sequences."""
    if given is None:
        return
    if given.get("type") != "Sequence":
        yield given
        return
    for step in given.get("normalizers") or given.get("decoders") or ():
        yield from _steps(step)


def _texts(step: dict[str, Any]) -> Iterator[str]:
    """Yield what a step looks for, and what it writes."""
    pattern = step.get("pattern")
    found = [*pattern.values()] if isinstance(pattern, dict) else []
    for text in (*found, step.get("content"), step.get("prepend")):
        if isinstance(text, str) and text:
            yield text


def _applied(kind: str, step: dict[str, Any]) -> Callable[[str], str]:
    from tokenizers import Tokenizer

    whole = Tokenizer.from_str(json.dumps({**_EMPTY, kind: step}))
    if kind == "normalizer":
        return lambda text: str(whole.normalizer.normalize_str(text))
    return lambda text: str(whole.decoder.decode([text]))
