"""Prompts whose tokenizing takes as long as a test wants."""

import asyncio
from typing import Any

import pytest

from aioserve.engine.input_processor import InputProcessor


def hold_tokenizing(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """From now on no prompt is tokenized before the event is set."""
    may_go_on, tokenize = asyncio.Event(), InputProcessor.tokenize

    async def late(*args: Any) -> Any:
        await may_go_on.wait()
        return await tokenize(*args)

    monkeypatch.setattr(InputProcessor, "tokenize", late)
    return may_go_on
