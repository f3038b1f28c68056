"""Tokenizers that tests share, and prompts whose tokenizing takes as long as a test wants."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

#: Folders of models whose tokenizer is read once for all that have the same files.
_SHARED: set[Path] = set()
#: What a tokenizer is read from, of the embedded model and its copies.
_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def share_tokenizer(path: Path) -> None:
    """Let the engines of this process share the tokenizer of a folder, a changed copy of the
    embedded model's, with each folder of the same content.
    """
    _SHARED.add(path)


def shared_files(path: Path) -> tuple[tuple[str, bytes], ...] | None:
    """Return the files that make the tokenizer of a folder, by name; None if it is not shared."""
    if path not in _SHARED:
        return None
    files = [path / name for name in _FILES]
    return tuple((file.name, file.read_bytes()) for file in files if file.exists())


def hold_tokenizing(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """From now on no prompt is tokenized before the event is set."""
    from aioserve.engine.input_processor import InputProcessor

    may_go_on, tokenize = asyncio.Event(), InputProcessor.tokenize

    async def late(*args: Any) -> Any:
        await may_go_on.wait()
        return await tokenize(*args)

    monkeypatch.setattr(InputProcessor, "tokenize", late)
    return may_go_on
