"""Items and tools of the Responses API as chat templates know them.

Refuses what no template could be told, with its place. Knows nothing about templates.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from aioserve.apis.responses.protocol import (
    CustomTool,
    FunctionTool,
    InputItem,
    InputPart,
    NamespaceTool,
    ResponsesRequest,
)
from aioserve.engine.chat.tools import FunctionDefinition, Names, ToolUse, template_call, tool_use
from aioserve.errors import UNREADABLE, RequestError
from aioserve.server.body import convert_part, refuse_all_but
from aioserve.server.fields import is_vendors
from aioserve.server.images import Content, ImageParts, Part, content_of, joined, text_part

Turn = dict[str, Any]

# By the types of items: the fields that each must have, and may have besides its labels.
_REQUIRED: Mapping[str, Sequence[str]] = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call": ("call_id", "name", "input"),
    "custom_tool_call_output": ("call_id", "output"),
    "reasoning": (),
    "web_search_call": (),
}
_OPTIONAL: Mapping[str, Sequence[str]] = {
    "function_call": ("namespace",),
    "function_call_output": ("name", "namespace"),
    "custom_tool_call": ("namespace",),
    "custom_tool_call_output": ("name", "namespace"),
    "reasoning": ("summary", "content"),
}
_LABELS = ("type", "id", "status", "phase", "caller", "encrypted_content", "action")
_SAID = ("input_text", "output_text")
_SHOWN = (*_SAID, "input_image")  # by users and by functions


def template_turns(
    items: Sequence[InputItem],
    images: ImageParts,
    num_before: int = 0,
    instructions: str | None = None,
) -> list[Turn]:
    """Return what the chat template gets to see of `items`, of which the first `num_before` are
    those of an earlier response and its input. What an assistant thinks, says and calls is one
    message, and so are messages of users, or of the system, in a row; `instructions` are the first
    of these. Of images, `images` takes note.

    Raises `RequestError`.
    """
    told = _Told(images)
    if instructions:
        told.say("system", instructions)
    for i, item in enumerate(items):
        told.add(item, f"input[{i - num_before}]" if i >= num_before else "previous_response_id")
        if i + 1 == num_before:
            told.end_turn()
    told.check_answered()
    return told.turns


class _Told:
    """The messages so far, and which calls wait for their outputs."""

    def __init__(self, images: ImageParts) -> None:
        self._images = images
        self.turns: list[Turn] = []
        self._own: Turn | None = None  # the assistant's, which may go on
        self._names: dict[str, str] = {}  # of all functions called, by the ids of the calls
        self._waiting: set[str] = set()  # ids of calls without output

    def end_turn(self) -> None:
        self._own = None

    def add(self, item: InputItem, path: str) -> None:
        kind = item.type or "message"
        required = _REQUIRED.get(kind)
        if required is None:
            known = ", ".join(map(repr, _REQUIRED))
            raise RequestError(
                f"{path}: items of type {kind[:64]!r} are not supported by this server, only "
                f"{known}",
                param=path,
            )
        refuse_all_but((*_LABELS, *required, *_OPTIONAL.get(kind, ())), item, path)
        for name in required:
            if getattr(item, name) is None:
                raise RequestError(f"{path}.{name} is missing", param=f"{path}.{name}")
        match kind:
            case "message":
                self._say(item, path)
            case "reasoning":
                self._think(item, path)
            case "function_call" | "custom_tool_call":
                self._call(item, path)
            case "function_call_output" | "custom_tool_call_output":
                self._answer(item, path)

    def _say(self, item: InputItem, path: str) -> None:
        if item.role == "assistant":
            text, turn = _text(item.content, f"{path}.content", _SAID), self._own
            # Without a call between them, two messages are two.
            if turn is None or (turn["content"] and "tool_calls" not in turn):
                turn = self._begin_turn()
            turn["content"] += text
            return
        self.end_turn()
        role = "system" if item.role == "developer" else item.role
        types = _SHOWN if role == "user" else _SAID
        content = content_of(_parts(item.content, f"{path}.content", types, self._images))
        self.say(role or "user", content)

    def say(self, role: str, content: Content) -> None:
        """A message, which goes on with the one before it if both are of the same role."""
        last = self.turns[-1:]
        if last and last[0]["role"] == role:
            self.turns[-1] = {**last[0], "content": joined(last[0]["content"], content)}
        else:
            self.turns.append({"role": role, "content": content})

    def _think(self, item: InputItem, path: str) -> None:
        text = _text(item.content, f"{path}.content", ("reasoning_text",))
        text = text or _text(item.summary, f"{path}.summary", ("summary_text",))
        if not text:
            return
        turn = self._own
        if turn is None or turn["content"] or "tool_calls" in turn:
            turn = self._begin_turn()
        turn["reasoning_content"] = turn.get("reasoning_content", "") + text

    def _call(self, item: InputItem, path: str) -> None:
        call_id, name = item.call_id or "", whole_name(item.namespace, item.name or "")
        if call_id in self._names:
            raise RequestError(
                f"{path}.call_id: there are two calls of the call_id {call_id[:128]!r}",
                param=f"{path}.call_id",
            )
        arguments = item.arguments or ""
        if item.type == "custom_tool_call":
            arguments = arguments_of(item.input or "")
        call = template_call(call_id, name, arguments)
        self._names[call_id] = name
        self._waiting.add(call_id)
        turn = self._own or self._begin_turn()
        turn.setdefault("tool_calls", []).append(call)

    def _answer(self, item: InputItem, path: str) -> None:
        call_id = item.call_id or ""
        if call_id not in self._waiting:
            why = "is answered already" if call_id in self._names else "stands before it"
            what = "the call" if call_id in self._names else "no call"
            raise RequestError(
                f"{path}.call_id: {what} of the call_id {call_id[:128]!r} {why}",
                param=f"{path}.call_id",
            )
        self._waiting.remove(call_id)
        self.end_turn()
        content = content_of(_parts(item.output, f"{path}.output", _SHOWN, self._images))
        turn = {"role": "tool", "content": content, "tool_call_id": call_id}
        self.turns.append({**turn, "name": self._names[call_id]})  # some templates say it

    def _begin_turn(self) -> Turn:
        self._own = {"role": "assistant", "content": ""}
        self.turns.append(self._own)
        return self._own

    def check_answered(self) -> None:
        if self._waiting:
            names = ", ".join(repr(call_id[:128]) for call_id in sorted(self._waiting)[:5])
            raise RequestError(
                f"calls without output: {names}; an item of type function_call_output must follow "
                "for each",
                param="input",
            )


def _text(content: str | list[InputPart] | None, path: str, types: Sequence[str]) -> str:
    return "".join(part["text"] for part in _parts(content, path, types, None))


def _parts(
    content: str | list[InputPart] | None,
    path: str,
    types: Sequence[str],
    images: ImageParts | None,
) -> list[Part]:
    """Return parts as chat templates know them. Without `images`, `types` must have no type of
    image.
    """
    if isinstance(content, str):
        return [text_part(content)]
    parts = []
    for i, part in enumerate(content or ()):
        place = f"{path}[{i}]"
        if part.type not in types:
            raise RequestError(
                f"{place}: parts of type {part.type[:64]!r} are not supported here, only "
                f"{' and '.join(map(repr, types))}",
                param=place,
            )
        is_image = part.type == "input_image"
        own = ("image_url", "detail") if is_image else ("text", "annotations", "logprobs")
        refuse_all_but(("type", *own), part, place)
        name, value = ("image_url", part.image_url) if is_image else ("text", part.text)
        if value is None:
            raise RequestError(f"{place}.{name} is missing", param=f"{place}.{name}")
        if is_image and images is not None:
            parts.append(images.media.add(f"{place}.{name}", value))
        else:
            parts.append(text_part(value))
    return parts


class Offered(NamedTuple):
    """The functions that a body offers, those of namespaces by their whole names."""

    use: ToolUse | None
    names: Mapping[str, tuple[str, str]]  # by whole name: namespace and name of a function in one
    customs: Collection[str]  # whole names of custom tools


NOTHING_OFFERED = Offered(None, {}, ())


def whole_name(namespace: str | None, name: str) -> str:
    """Return what the model calls a function of a namespace, in characters that all formats
    take.
    """
    return name if namespace is None else f"{namespace}__{name}"


def tools_of(body: ResponsesRequest, *, ignore_unknown: bool = False) -> Offered:
    """Return the tools that are offered, but those of vendors. Raises `RequestError` that says
    where.
    """
    offered: dict[str, FunctionDefinition] = {}
    names: dict[str, tuple[str, str]] = {}
    customs: set[str] = set()
    for path, entry, namespace in _entries(body, ignore_unknown):
        if entry.get("type") == "custom":
            custom = convert_part(entry, CustomTool, path, ignore_unknown=ignore_unknown)
            function = as_function(custom)
            customs.add(whole_name(namespace, custom.name))
        else:
            function = convert_part(entry, FunctionTool, path, ignore_unknown=ignore_unknown)
        whole = whole_name(namespace, function.name)
        if namespace is not None:
            names[whole] = (namespace, function.name)
        offered[path] = msgspec.structs.replace(function, name=whole)
    return Offered(_use(body, offered), names, customs)


def _entries(
    body: ResponsesRequest, ignore_unknown: bool
) -> Iterator[tuple[str, dict[str, Any], str | None]]:
    """Path, entry and namespace of each tool that a client runs."""
    for i, entry in enumerate(body.tools or ()):
        path, kind = f"tools[{i}]", entry.get("type")
        if kind == "namespace":
            space = convert_part(entry, NamespaceTool, path, ignore_unknown=ignore_unknown)
            for j, inner in enumerate(space.tools):
                yield f"{path}.tools[{j}]", inner, space.name
        elif not is_vendors(kind):
            yield path, entry, None


def _use(body: ResponsesRequest, offered: Mapping[str, FunctionDefinition]) -> ToolUse | None:
    choice, is_parallel = body.tool_choice or "auto", body.parallel_tool_calls is not False
    if isinstance(choice, str):
        return tool_use(offered, choice, is_parallel=is_parallel)
    is_allowed = choice.type == "allowed_tools"
    for name, is_own in (("name", not is_allowed), ("mode", is_allowed), ("tools", is_allowed)):
        if (getattr(choice, name) is not None) != is_own:
            verb = "needs" if is_own else "takes no"
            raise RequestError(
                f"tool_choice of type {choice.type} {verb} {name}", param=f"tool_choice.{name}"
            )
    if choice.name is not None:
        return tool_use(offered, "required", only=[choice.name], is_parallel=False)
    assert choice.mode is not None, "it was just checked"
    only = [tool.name for tool in choice.tools or ()]
    if not only:
        raise RequestError("tool_choice.tools must not be empty", param="tool_choice.tools")
    names = Names(chosen="tool_choice.tools")
    return tool_use(offered, choice.mode, only=only, is_parallel=is_parallel, names=names)


# Tools of type `custom`, whose input is any text: told to the model as functions with one text.
# Knows both shapes. Knows neither items nor events of responses.


_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def as_function(tool: CustomTool) -> FunctionDefinition:
    """Return the function that the model is told of. A grammar of the input is told in words."""
    told = [tool.description or ""]
    if definition := (tool.format or {}).get("definition"):
        told.append(f"The input keeps to this grammar:\n{definition}")
    description = "\n\n".join(filter(None, told))
    return FunctionDefinition(
        name=tool.name, description=description or None, parameters=_PARAMETERS
    )


def arguments_of(text: str) -> str:
    """Return the arguments, as JSON text, of a call whose input is `text`."""
    return msgspec.json.encode({"input": text}).decode()


def input_of(arguments: str) -> str:
    """Return the input that a call's arguments hold; if they are no such object, they are the
    input.
    """
    try:
        return msgspec.json.decode(arguments, type=dict[str, str])["input"]
    except (*UNREADABLE, KeyError):
        return arguments
