"""One session of an agent, which every library drives: tools, what the model says, what is asked.

A driver is an agent of one library over one wire format. It keeps its history.
"""

import base64
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Literal

import pydantic

INSTRUCTIONS = "You know the weather."
FIRST = "How is it in Paris and in Rome, and what is 2 + 3?"
SECOND = "And in Oslo?"
THOUGHT = "The tool will know."
ANSWER = "Rain in both, and 5."
LATER = "Rain there too."


def weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: Its name.
    """
    return f"rain in {city}"


def add(a: int, b: int) -> str:
    """The sum of two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return f"the sum is {a + b}"


TOOLS = (weather, add)
#: A red pixel.
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


class Place(pydantic.BaseModel, extra="forbid"):
    """Where it is warm."""

    city: Literal["Paris", "Rome"]
    is_warm: bool


class Driver(ABC):
    """An agent that asks the server at `url`, with a history of its own. With `output`, a type, it
    has no tools, and its answers are of that type.
    """

    words = "Let me see.\n"  # said before a call, where the reply may begin with text
    hands_back_reasoning = True
    shows_images = True  # that tools return
    has_outputs = True  # types of answers

    @abstractmethod
    def __init__(
        self, url: str, model: str = "embedded", output: type[pydantic.BaseModel] | None = None
    ) -> None: ...

    @abstractmethod
    async def ask(self, prompt: str) -> str:
        """The answer, once the model calls no more tools."""

    @abstractmethod
    def stream(self, prompt: str) -> AsyncIterator[str]:
        """A generator of all pieces of text. Closing it leaves the stream of the server."""

    @abstractmethod
    def resumed(self) -> "Driver":
        """Another agent with the history of this one, as it is stored."""

    def says(self, text: str) -> str:
        """What the model says for the agent to answer `text`."""
        return text

    async def told(self, prompt: str, *, is_streamed: bool) -> str:
        """All text that the user gets to see."""
        if not is_streamed:
            return await self.ask(prompt)
        pieces = [piece async for piece in self.stream(prompt)]
        assert len(pieces) > 3
        return "".join(pieces)

    async def leave(self, prompt: str) -> None:
        """Ask, and leave when the first piece has come."""
        async with aclosing(self.stream(prompt)) as pieces:
            async for _ in pieces:
                break


def call(name: str, **arguments: object) -> str:
    told = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{told}\n</tool_call>"


def first_script(driver: Driver) -> tuple[str, ...]:
    """A thought and a call, two calls at once, the answer."""
    return (
        f"<think>\n{THOUGHT}\n</think>\n\n" + driver.words + call("weather", city="Paris"),
        call("weather", city="Rome") + "\n" + call("add", a=2, b=3),
        driver.says(ANSWER),
    )


def second_script(driver: Driver) -> tuple[str, ...]:
    return call("weather", city="Oslo"), driver.says(LATER)


def check_order(words: Sequence[str], text: str) -> None:
    """Each of the words stands in the text, behind the one before it."""
    rest = text
    for word in filter(None, words):
        _, found, rest = rest.partition(word)
        assert found, f"{word!r} does not follow in {text}"
