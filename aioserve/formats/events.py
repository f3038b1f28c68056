"""What a reply turns out to say, piece by piece.

Plain data. Knows nothing about how it was written or how it is sent.
"""

import msgspec


class Content(msgspec.Struct, frozen=True):
    """More of what is said to the user."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """More of what the model thinks aloud."""

    text: str


class Call(msgspec.Struct, frozen=True):
    """A call begins; its arguments follow."""

    name: str
    id: str | None = None  # where the model wrote one; else the server makes one


class Arguments(msgspec.Struct, frozen=True):
    """More of the arguments of the last call, as JSON text."""

    text: str


Event = Content | Reasoning | Call | Arguments


def joined(events: list[Event]) -> list[Event]:
    """The same with neighbours of one kind as one, whatever pieces they came in."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, Content) and isinstance(last, Content):
            result[-1] = Content(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            result[-1] = Reasoning(last.text + event.text)
        elif isinstance(event, Arguments) and isinstance(last, Arguments):
            result[-1] = Arguments(last.text + event.text)
        else:
            result.append(event)
    return result
