"""Tokenizers that tests share, and prompts whose tokenizing takes as long as a test wants."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

#: Folders of models whose tokenizer is read once for all that have the same files.
_SHARED: set[Path] = set()


def share_tokenizer(path: Path) -> None:
    """Let the engines of this process share the tokenizer of this folder with each folder of the
    same content.
    """
    _SHARED.add(path)


def shared_files(path: Path) -> tuple[tuple[str, bytes], ...] | None:
    """Return the files that make the tokenizer of a folder, by name; None if it is not shared."""
    if path not in _SHARED:
        return None
    files = [file for file in sorted(path.iterdir()) if file.suffix in (".json", ".jinja")]
    return tuple((file.name, file.read_bytes()) for file in files)


def hold_tokenizing(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """From now on no prompt is tokenized before the event is set."""
    from aioserve.engine.input_processor import InputProcessor

    may_go_on, tokenize = asyncio.Event(), InputProcessor.tokenize

    async def late(*args: Any) -> Any:
        await may_go_on.wait()
        return await tokenize(*args)

    monkeypatch.setattr(InputProcessor, "tokenize", late)
    return may_go_on
