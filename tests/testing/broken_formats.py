"""Formats with one planted bug each: what the contract must catch, and how it says so.

They are Hermes's format without it, or the one of tests/formats/channels.py. Every docstring names
the bug; `CAUGHT_BY` holds what the message must say.
"""

import json
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from aioserve.features.formats import (
    Arguments,
    Beginning,
    Call,
    CallObject,
    Content,
    Event,
    Function,
    Literal,
    Reply,
    ReplyFormat,
    SaidCall,
    any_of,
)
from aioserve.features.formats.json_formats import HermesParser
from tests.formats.channels import ChannelFormat

CAUGHT_BY: dict[type[ReplyFormat], str] = {}  # a regular expression of the message


def caught_by(message: str) -> Any:
    """Register a broken format with what its violation says."""

    def register(broken: type[ReplyFormat]) -> type[ReplyFormat]:
        CAUGHT_BY[broken] = message
        return broken

    return register


@caught_by("loses or changes text that is no call")
class LosesHeldText(HermesParser):
    """What may be the beginning of a mark is gone when the reply ends with it."""

    def flush(self) -> list[Event]:
        self.take(len(self.text))
        return super().flush()


@caught_by("changes text that is no call")
class SaysTwice(HermesParser):
    """What turned out to be no call is said as it is held, and again when it is given back."""

    def give_back(self) -> None:
        held = "".join(self.held or ())
        super().give_back()
        self.say(held)


@caught_by("otherwise in pieces: .*id='c")
class ChangesIdsWhenStreamed(HermesParser):
    """The id of a call is the number of the piece in which its name came."""

    num_pieces = 0

    def append(self, text: str) -> list[Event]:
        self.num_pieces += 1
        return super().append(text)

    def tell(self, events: list[Event]) -> None:
        super().tell(
            [Call(e.name, f"c{self.num_pieces}") if isinstance(e, Call) else e for e in events]
        )


@caught_by("gives one id to several calls")
class GivesOneIdToAll(HermesParser):
    """Every call has the same id."""

    def tell(self, events: list[Event]) -> None:
        super().tell([Call(e.name, "call_0") if isinstance(e, Call) else e for e in events])


@caught_by("makes .* characters of text anew for 4\\d\\d characters")
class CopiesAllText(HermesParser):
    """Keeps the whole reply in one text, to which each piece is added."""

    whole = ""

    def append(self, text: str) -> list[Event]:
        self.whole += text
        return super().append(text)


@caught_by(r"runs .* lines for 4\d\d characters of .* times as many for 4 times the text")
class LooksAtAllPiecesAgain(HermesParser):
    """Goes through all pieces so far whenever one more comes."""

    def append(self, text: str) -> list[Event]:
        self.pieces = [*getattr(self, "pieces", []), text]
        self.num_quotes = 0
        for piece in self.pieces:
            self.num_quotes += piece.count('"')
        return super().append(text)


@caught_by("raised JSONDecodeError: .* at ")
class RaisesOnBrokenArguments(HermesParser):
    """Decodes the arguments at the end of a reply."""

    def append(self, text: str) -> list[Event]:
        events = super().append(text)
        if self.is_last and self.object.is_broken:
            json.loads(self.text or "{")
        return events


@caught_by("wrote .*, and reads it as ")
class SwallowsContentAfterACall(HermesParser):
    """After the first call nothing is content."""

    has_called = False

    def tell(self, events: list[Event]) -> None:
        self.has_called = self.has_called or bool(events)
        super().tell(events)

    def say(self, text: str) -> None:
        if not self.has_called:
            super().say(text)


@caught_by("otherwise in pieces")
class MissesASplitMark(HermesParser):
    """Looks for the mark in each piece alone."""

    def begin(self) -> bool:
        found = any_of(["<tool_call>"]).search(self.text, self.at)
        if found is not None:
            return super().begin()
        self.say(self.take(len(self.text)))
        return False


@caught_by("loses or changes text that is no call")
class DropsWhatIsNoCall(HermesParser):
    """Text that began as a call and is none is gone."""

    def give_back(self) -> None:
        self.held = None


@caught_by("otherwise in pieces|wrote")
class MixesReplies(HermesParser):
    """All replies share the list of what was read of them."""

    names: ClassVar[list[str]] = []

    def tell(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Call):
                self.names.append(event.name)
                event = Call(event.name, f"{event.name}:{len(self.names)}")
            super().tell([event])


@caught_by("while it reads others")
class SharesTheCall(HermesParser):
    """All replies that are read at the same time share what was read of a call."""

    shared: ClassVar[list[CallObject]] = []

    def _open(self) -> bool:
        is_open = super()._open()
        self.shared[:] = [self.object]
        return is_open

    def _read_call(self) -> bool:
        self.object = self.shared[0]
        return super()._read_call()


@caught_by("did not come back in 10 s")
class GoesRoundForEver(HermesParser):
    """Waits at the end of a reply for what never comes."""

    def flush(self) -> list[Event]:
        while self.text.endswith("<"):
            time.sleep(0.001)
        return super().flush()


@caught_by("writes what its grammar does not allow")
class BindsAnotherText(HermesParser):
    """The grammar wants no line breaks, which the model writes."""

    @classmethod
    def grammar(cls, functions: Sequence[Function], is_parallel: bool, literal: Literal) -> str:
        return super().grammar(functions, is_parallel, literal).replace('"\\n"', '""')


@caught_by("writes what its grammar does not allow")
class WritesTokensAsText(HermesParser):
    """The grammar writes the marks as texts, though the model may have tokens for them."""

    @classmethod
    def grammar(cls, functions: Sequence[Function], is_parallel: bool, literal: Literal) -> str:
        return super().grammar(functions, is_parallel, json.dumps)


@caught_by("a grammar that does not compile")
class BeginsWithMoreThanAToken(HermesParser):
    """What shows that a call begins is a token and a line break, which no pattern can hold."""

    @classmethod
    def beginnings(cls, functions: Sequence[Function], literal: Literal) -> list[Beginning]:
        return [Beginning(literal("<tool_call>\n"), f"call {literal(chr(10) + '</tool_call>')}")]


@caught_by("a grammar that allows what it must not")
class BindsNoArguments(HermesParser):
    """The grammar takes any object for arguments."""

    @classmethod
    def grammar(cls, functions: Sequence[Function], is_parallel: bool, literal: Literal) -> str:
        free = [Function(each.name, {"type": "object"}) for each in functions]
        return super().grammar(free, is_parallel, literal)


@caught_by("a grammar that allows what it must not")
class BindsSeveralCalls(HermesParser):
    """The grammar takes several calls, where one is forced."""

    @classmethod
    def grammar(cls, functions: Sequence[Function], is_parallel: bool, literal: Literal) -> str:
        return super().grammar(functions, True, literal)


@caught_by("a grammar that does not compile")
class BindsByNoGrammar(HermesParser):
    """A rule of the grammar is missing."""

    @classmethod
    def grammar(cls, functions: Sequence[Function], is_parallel: bool, literal: Literal) -> str:
        return super().grammar(functions, is_parallel, literal).replace("unmarked:", "unmarkd:")


@caught_by("a grammar that allows what it must not")
class LeavesStrictCallsFree(HermesParser):
    """Nothing is said to begin a call that a call begins with."""

    @classmethod
    def beginnings(cls, functions: Sequence[Function], literal: Literal) -> list[Beginning]:
        return [Beginning(literal("<tool_cal>"), "unmarked")]


@caught_by("wrote .*, and reads it as ")
class MakesTextsOfAllValues(HermesParser):
    """Numbers and booleans come as texts."""

    @classmethod
    def write(cls, reply: Reply) -> str:
        calls = [
            SaidCall(name, {key: str(value) for key, value in given.items()})
            for name, given in reply.calls
        ]
        return super().write(reply._replace(calls=calls))


@caught_by("gives arguments .* that are not right behind a call")
class TellsArgumentsFirst(HermesParser):
    """An empty piece of arguments comes before its call."""

    def tell(self, events: list[Event]) -> None:
        super().tell([Arguments(""), *events])


@caught_by("its calls are not the first of the whole's|not right behind a call")
class CompletesCutArguments(HermesParser):
    """A call that was cut off gets the brace that it lacks."""

    depth = 0

    def flush(self) -> list[Event]:
        is_open = self.held is None and not self.object.is_done and self.object.is_named
        return super().flush() + ([Arguments("}")] if is_open else [])


@caught_by("calls a tool though there is none")
class CallsWithoutTools(ChannelFormat):
    """Reads calls in a reply that was given no tools."""

    def __init__(self, functions: Sequence[Function], prompt_end: str = "") -> None:
        super().__init__(functions, prompt_end)
        self.functions = self.functions or {name: Function(name, {}) for name in ("add",)}


@caught_by("evidence gives 'Hermes'")
class TellsNoEvidence(HermesParser):
    """Names the family instead of what shows it."""

    @classmethod
    def evidence(cls, template: str) -> str | None:
        return "Hermes" if "<tool_call>" in template else None


@caught_by("reads a text as ")
class TrimsContent(HermesParser):
    """Space at the ends of a reply without calls is gone."""

    def flush(self) -> list[Event]:
        events = super().flush()
        return [e for e in events if not isinstance(e, Content) or e.text.strip()]


@caught_by("make_id gives 'call_1'")
class MakesOneId(HermesParser):
    """Every call for which the model wrote no id gets the same."""

    @staticmethod
    def make_id() -> str:
        return "call_1"


@caught_by("counts 1 malformed calls in pieces|counts 1 malformed calls in its own")
class CountsPieces(HermesParser):
    """Counts a mark that comes in pieces as a malformed call."""

    def append(self, text: str) -> list[Event]:
        self.num_malformed += self.text[self.at :].endswith("<tool_cal") and not self.is_last
        return super().append(text)


@caught_by("gives Content.* which is no event|gives .* without a text")
class GivesNoText(HermesParser):
    """Says nothing as None."""

    def flush(self) -> list[Event]:
        return [*super().flush(), Content(None)]  # type: ignore[arg-type]
