"""Which formats there are, and which one reads the replies of a model.

Formats that ship are brought by parts. A format is imported when it is asked for by
name, or when a chat template has its sign. Knows two settings and a template's text; knows nothing
about requests or tokenizers.
"""

import logging
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from typing import NamedTuple

from aioserve.errors import ConfigError
from aioserve.server.chat.reply_format import MARKS, Marks, ReplyFormat, choose_reasoning
from aioserve.support.nearest import did_you_mean
from aioserve.support.parts import brought
from aioserve.support.plugins import Kind, installed, installed_entry_points

logger = logging.getLogger(__name__)

GROUP = "aioserve.formats"  # of entry points, by which other packages register formats

#: By name, where the class is that ships: in the order in which a chat template is asked for each.
SHIPPED = {name: where for (name, *_), where in brought("reply formats").items()}
#: By name, texts of which a chat template has one where its model writes the format: others are not
#: imported to be asked.
_SIGNS = {name: signs for name, *signs in brought("reply formats")}


def available_formats() -> dict[str, EntryPoint]:
    """Formats by name, sorted by it; `ConfigError` if two packages claim one name."""
    return installed(GROUP, "format", [EntryPoint(*each, GROUP) for each in SHIPPED.items()])


_FORMAT = Kind(
    word="format",
    words="formats",
    interface=ReplyFormat,  # type: ignore[type-abstract]
    base="CallParser or ReplyFormat",
    available=available_formats,
)


def load_format(spec: str) -> type[ReplyFormat]:
    """Return the format that `spec` names: a name, `package.module`, `file.py`, either with
    `:Class`.

    Raises `ConfigError` that lists what there is, or says by file and line why it cannot be
    imported.
    """
    return _FORMAT.load(spec)


def asked_formats(template: str) -> Iterator[tuple[str, type[ReplyFormat]]]:
    """Yield names and formats in the order in which a chat template is asked for each: those of
    other packages first, since they were installed for a reason. Of those that ship, the ones of
    which the template has a sign.
    """
    for entry_point in sorted(installed_entry_points(GROUP), key=lambda e: e.name):
        name = entry_point.name
        try:
            yield name, load_format(entry_point.value)
        except ConfigError as error:
            logger.warning("the format %s of another package is passed over: %s", name, error)
    for name, value in SHIPPED.items():
        if any(sign in template for sign in _SIGNS[name]):
            yield name, load_format(value)


AUTO, NONE = "auto", "none"


class Choice(NamedTuple):
    """The choice of what reads replies, and the reason for it."""

    name: str | None  # of the format; None: there is none
    format: type[ReplyFormat] | None
    takes_tools: bool  # whether requests may have tools
    marks: Marks | None  # of reasoning that is read before the format reads
    why: str  # a sentence for the log, without its period


def choose(tool_call_parser: str, reasoning_parser: str, template: str) -> Choice:
    """Return the format for a model with this chat template. Both names may be `auto`, as the
    template shows it, or `none`. Raises `ConfigError` for a name that is none, or two that
    contradict.
    """
    name, chosen, by = _choose_format(tool_call_parser, template)
    takes_tools = tool_call_parser != NONE and chosen is not None
    if tool_call_parser == NONE:
        whole = _whole_format(reasoning_parser, template)
        if whole is not None:
            name, chosen, by = whole
    if chosen is not None and chosen.reads_reasoning:
        _check_whole(name, reasoning_parser)
        calls = "" if takes_tools else "; tools are refused (server.tool_call_parser is none)"
        return Choice(name, chosen, takes_tools, None, f"{name} reads whole replies{by}{calls}")
    marks_name, marks, marks_by = _choose_marks(reasoning_parser, chosen, name, template)
    read = f"{name} reads tool calls{by}" if chosen else f"no tool calls are read{by}"
    thought = f"{marks_name} reads reasoning" if marks else "no reasoning is read"
    return Choice(name, chosen, takes_tools, marks, f"{read}, {thought}{marks_by}")


def check_names(tool_call_parser: str, reasoning_parser: str) -> None:
    """Raise `ConfigError` if a format that is named cannot be loaded; no template is needed."""
    if tool_call_parser not in (AUTO, NONE):
        load_format(tool_call_parser)
    if reasoning_parser not in (AUTO, NONE, *MARKS):
        _load_reasoning(reasoning_parser)


def _choose_format(name: str, template: str) -> tuple[str | None, type[ReplyFormat] | None, str]:
    """Name, format, and by what, in words."""
    if name == NONE:
        return None, None, " (server.tool_call_parser is none)"
    if name != AUTO:
        return name, load_format(name), " (server.tool_call_parser)"
    for known, each in asked_formats(template):
        evidence = each.evidence(template)
        if evidence is not None:
            return known, each, f" ({_shown(evidence)} in the chat template)"
    return None, None, " (the chat template shows no format that is known here)"


def _whole_format(
    reasoning_parser: str, template: str
) -> tuple[str | None, type[ReplyFormat] | None, str] | None:
    """Return the format that tells reasoning from content by itself, though tools are refused."""
    if reasoning_parser == AUTO:
        found = _choose_format(AUTO, template)
    elif reasoning_parser in (NONE, *MARKS):
        return None
    else:
        found = reasoning_parser, _load_reasoning(reasoning_parser), " (server.reasoning_parser)"
    return found if found[1] is not None and found[1].reads_reasoning else None


def _check_whole(name: str | None, reasoning_parser: str) -> None:
    if reasoning_parser in (AUTO, name):
        return
    raise ConfigError(
        f"server.reasoning_parser is {reasoning_parser}, but the format {name} reads reasoning by "
        "itself: leave server.reasoning_parser at auto, or set server.tool_call_parser to none too"
    )


def _choose_marks(
    name: str, chosen: type[ReplyFormat] | None, format_name: str | None, template: str
) -> tuple[str, Marks | None, str]:
    """Return the name of the marks, the marks, and by what, in words."""
    if name == NONE:
        return name, None, " (server.reasoning_parser is none)"
    if name in MARKS:
        return name, MARKS[name], " (server.reasoning_parser)"
    if name != AUTO:
        found = _load_reasoning(name)
        if found.reads_reasoning:
            raise ConfigError(
                f"server.reasoning_parser is {name}, a format that reads whole replies, but "
                f"server.tool_call_parser is {format_name}: set both to {name}"
            )
        return name, found.marks, " (server.reasoning_parser)"
    own = None if chosen is None else chosen.marks
    if own is not None and (own.start in template or own.end in template):
        return f"{format_name}", own, _by(own, template)
    by_template = choose_reasoning(template)
    if by_template is None:
        return name, None, " (the chat template shows no marks that are known here)"
    return by_template, MARKS[by_template], _by(MARKS[by_template], template)


def _load_reasoning(name: str) -> type[ReplyFormat]:
    """Return the format of that name, which must tell reasoning or have marks of it."""
    if "." not in name and name not in (formats := available_formats()):
        known = [AUTO, NONE, *MARKS, *formats]
        raise ConfigError(
            f"server.reasoning_parser is {name!r}, which names no marks and no format"
            f"{did_you_mean(name, known)}; available: {', '.join(known)}; or give "
            "package.module:Class or path/to/file.py"
        )
    found = load_format(name)
    if found.marks is None and not found.reads_reasoning:
        raise ConfigError(
            f"server.reasoning_parser is {name}, a format with no marks of reasoning; expected one "
            f"of {', '.join((AUTO, NONE, *MARKS))}, or a format that has marks"
        )
    return found


def _by(marks: Marks, template: str) -> str:
    sign = marks.start if marks.start in template else marks.end
    return f" ({_shown(sign)} in the chat template)"


def _shown(evidence: str) -> str:
    return repr(evidence) if len(evidence) <= 60 else f"{evidence[:60]!r}..."
