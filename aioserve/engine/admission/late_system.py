"""Messages of role system behind others, as agents send them, for templates that take none there.

Knows messages. Which templates take them is known in `chat_template`.
"""

from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]

#: Where a template shows the text of the last message, it takes such a message as it is.
PROBE: Sequence[Message] = (
    {"role": "user", "content": "?"},
    {"role": "system", "content": "probe"},
)


def has_late_system(messages: Sequence[Message]) -> bool:
    """Whether a message of role system stands behind the first message."""
    return any(message["role"] == "system" for message in messages[1:])


def without_late_system(messages: Sequence[Message]) -> list[Message]:
    """The same messages with those of role system at the beginning as one, and each later one as
    text of a user, joined to the user's messages beside it.
    """
    told: list[Message] = []
    is_open = False  # whether the last one is a user's that a further one joins
    for message in messages:
        is_system = message["role"] == "system"
        is_leading = is_system and all(each["role"] == "system" for each in told)
        if is_system and not is_leading:
            message = {"role": "user", "content": message["content"]}
        is_user = message["role"] == "user"
        joins = is_user and (is_open or is_system) and told[-1]["role"] == "user"
        if joins or (is_leading and told):
            content = _joined(told[-1]["content"], message["content"])
            told[-1] = {**told[-1], "content": content}
        else:
            told.append(message)
        is_open = is_user and is_system
    return told


def _joined(first: Any, second: Any) -> Any:
    """Two contents, each a text or a list of parts, with an empty line between them."""
    if isinstance(first, str) and isinstance(second, str):
        return "\n\n".join(filter(None, (first, second)))
    before, after = (
        [{"type": "text", "text": each}] if isinstance(each, str) else list(each or ())
        for each in (first, second)
    )
    return [*before, {"type": "text", "text": "\n\n"}, *after]
