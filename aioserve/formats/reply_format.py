"""What a format of replies is: the one interface between a family of models and the server.

Knows what is asked of a format. Knows no format, and not where formats come from.
"""

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from aioserve.formats.events import Event
from aioserve.formats.grammar import Beginning, Function, Literal
from aioserve.formats.reasoning import Marks


class SaidCall(NamedTuple):
    """A call that a reply makes, with its arguments as objects."""

    name: str
    arguments: Mapping[str, Any]


class Reply(NamedTuple):
    """What a whole reply says: reasoning, then content, then calls."""

    content: str = ""
    calls: Sequence[SaidCall] = ()
    reasoning: str = ""  # only for a format that reads it itself


def dumps(value: Any) -> str:
    """JSON as chat templates write it."""
    return json.dumps(value, ensure_ascii=False)


def object_of(call: SaidCall, key: str = "arguments") -> str:
    """A call as a JSON object with a name and arguments, which stand under `key`."""
    return dumps({"name": call.name, key: call.arguments})


class ReplyFormat(ABC):
    """How a family of models writes replies. An instance reads one reply: text goes into `append`
    in any pieces, and `flush` ends it; both return events.

    The joined events are the same however the text was cut. No text raises: what is no call is
    content. Each character is looked at a bounded number of times.
    """

    #: Special tokens that must stay in the text of a reply; all that begins or ends anything.
    markers: ClassVar[tuple[str, ...]] = ()
    #: How this family marks its reasoning. None: the chat template shows it, if there is any.
    marks: ClassVar[Marks | None] = None
    #: Whether the format tells reasoning by itself, and so reads replies without tools, too.
    reads_reasoning: ClassVar[bool] = False
    #: If it does: the marks of reasoning, by which reasoning tokens are counted and bound; and what
    #: has to follow where the end mark is forced.
    thinking: ClassVar[Marks | None] = None
    after_thinking: ClassVar[str] = ""
    #: Whether content may stand before the calls of a reply, and behind them.
    has_text_before: ClassVar[bool] = True
    has_text_after: ClassVar[bool] = True

    def __init__(self, functions: Sequence[Function], prompt_end: str = "") -> None:
        """`functions`: those that may be called, with the schemas of their arguments. `prompt_end`:
        the last characters of the prompt, which may have begun the reply.
        """
        self.functions: Mapping[str, Function] = {each.name: each for each in functions}
        self.prompt_end = prompt_end
        #: Pieces of text so far that began as a call, were none, and so are content.
        self.num_malformed = 0

    @abstractmethod
    def append(self, text: str) -> list[Event]:
        """Read more of a reply; the events that this text completes."""

    @abstractmethod
    def flush(self) -> list[Event]:
        """What was held back, now that nothing more comes. Called once."""

    @staticmethod
    def make_id() -> str:
        """An id for a call in whose text the model wrote none."""
        return f"call_{secrets.token_hex(12)}"

    @classmethod
    @abstractmethod
    def evidence(cls, template: str) -> str | None:
        """The part of a chat template that shows that its model writes replies in this format; None
        if the template does not show it.
        """

    @classmethod
    @abstractmethod
    def grammar(cls, functions: Sequence[Function], is_parallel: bool, literal: Literal) -> str:
        """Lark rules of which `calls` is one call of one of `functions`, or several. It binds a
        reply that must call, behind its reasoning. Raises `ValueError` for functions whose schemas
        make more rules than can be compiled.
        """

    @classmethod
    @abstractmethod
    def beginnings(cls, functions: Sequence[Function], literal: Literal) -> list[Beginning]:
        """What calls of `functions` begin with, where that is no text, whatever follows: from there
        on the grammar binds calls that the model makes by itself. Empty if nothing shows it.
        """

    @classmethod
    @abstractmethod
    def write(cls, reply: Reply) -> str:
        """The text in which a model of this family says `reply`, without the token that ends its
        turn; the contract reads it back.

        Raises `ValueError` for what cannot be said in this format.
        """

    # For formats that read reasoning themselves.

    @classmethod
    def reasoning_rules(cls, literal: Literal) -> str:
        """Lark rules of which `reasoning` is all that may stand before a reply that is bound, or
        nothing. Empty if there is nothing.
        """
        return ""

    @classmethod
    def answer_rules(cls, literal: Literal) -> str:
        """Lark rules of which `answer` is a reply whose content is the rule `content`."""
        return "answer: content"
