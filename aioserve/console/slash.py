"""What can be said to `chat` itself instead of the model: lines that begin with a slash.

Knows the conversation. Knows no terminal: a command answers with a text.
"""

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import yaml

from aioserve.console.conversation import SAMPLING, Conversation, Reply
from aioserve.errors import RequestError
from aioserve.nearest import did_you_mean


class Quit(Exception):
    """The user has ended the conversation."""


class Command(NamedTuple):
    """A line of /help, and what does it, given the words after the name."""

    usage: str
    about: str
    run: Callable[[Conversation, str], Awaitable[str]]


async def run_command(conversation: Conversation, line: str) -> str:
    """What the command of `line`, slash included, has to say. Raises `Quit`, `RequestError`, and
    what `AsyncClient` raises.
    """
    name, _, rest = line[1:].partition(" ")
    if name not in COMMANDS:
        meant = did_you_mean(name, COMMANDS).replace("'", "")
        raise RequestError(f"unknown command /{name}{meant}; /help lists all")
    return await COMMANDS[name].run(conversation, rest.strip())


def describe(reply: Reply) -> str:
    """Counts and times of a reply in a line."""
    cached = f" ({reply.num_cached_tokens} cached)" if reply.num_cached_tokens else ""
    counts = f"{reply.num_prompt_tokens} prompt tokens{cached}, {reply.num_output_tokens} output"
    if reply.first_text is None:
        return f"{counts}; {reply.seconds:.2f} s"
    rate = reply.tokens_per_second
    after = "" if rate is None else f", then {rate:.1f} tokens/s"
    return f"{counts}; TTFT {1e3 * reply.first_text:.0f} ms{after}; {reply.seconds:.2f} s"


async def _help(conversation: Conversation, rest: str) -> str:
    width = max(len(command.usage) for command in COMMANDS.values())
    lines = [f"{command.usage:{width}}  {command.about}" for command in COMMANDS.values()]
    return "\n".join(
        [
            *lines,
            'A line that ends in a backslash goes on; so does all between two lines of """.',
            "Two slashes begin a message with one. Ctrl-C stops a reply, twice leaves.",
        ]
    )


async def _set(conversation: Conversation, rest: str) -> str:
    for word in rest.split():
        name, equals, value = word.partition("=")
        if not equals:
            raise RequestError(
                f"expected NAME=VALUE, got {word!r}; there are {', '.join(SAMPLING)}"
            )
        conversation.set_sampling(name, value)
    told = [f"{name}={value}" for name, value in conversation.sampling.items()]
    return " ".join(told) or f"nothing is set: {conversation.defaults}"


async def _system(conversation: Conversation, rest: str) -> str:
    if rest:
        conversation.system = "" if rest == "off" else rest
    return f"system prompt: {conversation.system}" if conversation.system else "no system prompt"


async def _policy(conversation: Conversation, rest: str) -> str:
    if not rest:
        raise RequestError(f"which policy? {COMMANDS['policy'].usage}")
    name, *words = rest.split()
    options: dict[str, Any] = {}
    for word in words:
        option, equals, value = word.partition("=")
        if not equals:
            raise RequestError(f"expected OPTION=VALUE, got {word!r}")
        try:
            options[option] = yaml.safe_load(value)
        except yaml.YAMLError:
            options[option] = value
    try:
        before, _ = await conversation.client.switch_policy(name, options)
    except RequestError as error:
        if "no such path" not in str(error):
            raise
        raise RequestError("the server has no admin routes: start it with --enable-admin") from None
    return f"policy {name} from the next step on; before: {before}"


async def _stats(conversation: Conversation, rest: str) -> str:
    if not conversation.replies:
        return "no reply yet"
    replies = conversation.replies
    if len(replies) == 1:
        return f"last reply: {describe(replies[-1])}"
    totals = (
        f"{sum(reply.num_prompt_tokens for reply in replies)} prompt tokens, "
        f"{sum(reply.num_output_tokens for reply in replies)} output; "
        f"{sum(reply.seconds for reply in replies):.2f} s"
    )
    return f"last reply: {describe(replies[-1])}\nall {len(replies)}: {totals}"


async def _reset(conversation: Conversation, rest: str) -> str:
    conversation.reset()
    return "a new conversation"


async def _quit(conversation: Conversation, rest: str) -> str:
    raise Quit


COMMANDS = {
    "set": Command("/set [NAME=VALUE ...]", "sampling; NAME= is its default again", _set),
    "system": Command("/system [TEXT | off]", "the system prompt, from the next reply on", _system),
    "policy": Command(
        "/policy NAME [OPTION=VALUE ...]",
        "the scheduler policy of the server (with --enable-admin)",
        _policy,
    ),
    "stats": Command("/stats", "tokens, time to first token, tokens per second", _stats),
    "reset": Command("/reset", "forget what was said", _reset),
    "help": Command("/help", "this list", _help),
    "quit": Command("/quit", "leave, as Ctrl-D does", _quit),
}
