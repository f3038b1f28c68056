"""Blocks of Anthropic's messages: which there are where, and what templates see of them.

Texts, images and documents become parts of a content. Refuses, with its place, what is served
nowhere. Knows nothing of turns and calls.
"""

from collections.abc import Mapping, Sequence

from aioserve.errors import RequestError
from aioserve.server.anthropic.protocol import Block, Source
from aioserve.server.images import ImageParts, Part, text_part
from aioserve.server.validation import refuse_all_but

# By role of the message: the types of blocks, with the fields that each has.
SYSTEM: Mapping[str, Sequence[str]] = {"text": ("text",)}
_SHOWN: Mapping[str, Sequence[str]] = {
    **SYSTEM,
    "image": ("source",),
    "document": ("source", "title", "context"),
}
BLOCKS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "system": SYSTEM,
    "user": {**_SHOWN, "tool_result": ("tool_use_id", "content", "is_error")},
    "assistant": {
        **SYSTEM,
        "tool_use": ("id", "name", "input"),
        "thinking": ("thinking", "signature"),
        "redacted_thinking": (),  # no model but its vendor's can read it
    },
}
RESULTS: Mapping[str, Sequence[str]] = {**_SHOWN, "tool_reference": ("tool_name",)}
_REQUIRED = {
    "text": ("text",),
    "image": ("source",),
    "document": ("source",),
    "tool_result": ("tool_use_id",),
    "tool_use": ("id", "name", "input"),
    "thinking": ("thinking",),
    "tool_reference": ("tool_name",),
}
# By type of the source: the fields that it has.
_OF_IMAGES: Mapping[str, Sequence[str]] = {"base64": ("media_type", "data"), "url": ("url",)}
_OF_DOCUMENTS: Mapping[str, Sequence[str]] = {
    "text": ("media_type", "data"),
    "content": ("content",),
}
_IN_DOCUMENTS: Mapping[str, Sequence[str]] = {**SYSTEM, "image": ("source",)}
_HINTS = ("cache_control", "caller", "citations", "data")


def checked_blocks(
    content: str | list[Block], types: Mapping[str, Sequence[str]], path: str
) -> Sequence[Block]:
    """The blocks of a content, each of one of these types, with its fields and no others. Raises
    `RequestError` with the place of another one.
    """
    if isinstance(content, str):
        return [Block(type="text", text=content)]
    for i, block in enumerate(content):
        place = f"{path}[{i}]"
        if block.type not in types:
            known = " and ".join(map(repr, types))
            raise RequestError(
                f"{place}: blocks of type {block.type[:64]!r} are not supported here, only {known}",
                param=place,
            )
        refuse_all_but(("type", *types[block.type], *_HINTS), block, place)
        for name in _REQUIRED.get(block.type, ()):
            if getattr(block, name) is None:
                raise RequestError(f"{place}.{name} is missing", param=f"{place}.{name}")
    return content


def all_parts(blocks: Sequence[Block], path: str, images: ImageParts) -> list[Part]:
    """Checked blocks as chat templates know them, in their order. Raises `RequestError`."""
    return [part for i, one in enumerate(blocks) for part in parts_of(one, f"{path}[{i}]", images)]


def parts_of(block: Block, path: str, images: ImageParts) -> list[Part]:
    """A checked block of text, images or both, as chat templates know it; of images, `images`
    takes note. Raises `RequestError`.
    """
    if block.type == "tool_reference":  # every tool is told at once
        return [text_part(f"The tool {block.tool_name} can be called.\n")]
    if block.source is None:
        return [text_part(block.text or "")]
    if block.type == "document":
        return _document(block, block.source, path, images)
    source, path = block.source, f"{path}.source"
    _check_source(source, _OF_IMAGES, path)
    if source.type == "url":
        return [images.add(f"{path}.url", source.url or "")]
    return [images.add_base64(path, source.media_type or "", source.data or "")]


def _document(block: Block, source: Source, path: str, images: ImageParts) -> list[Part]:
    """A document in its place: title and context a line each, then all that is in it."""
    path = f"{path}.source"
    _check_source(source, _OF_DOCUMENTS, path)
    if source.type == "content":
        inner = checked_blocks(source.content or "", _IN_DOCUMENTS, f"{path}.content")
        parts = all_parts(inner, f"{path}.content", images)
    elif source.media_type != "text/plain":
        raise RequestError(
            f"{path}.media_type must be 'text/plain', got {source.media_type!r:.64}",
            param=f"{path}.media_type",
        )
    else:
        parts = [text_part(source.data or "")]
    heads = [text_part(f"{line}\n") for line in (block.title, block.context) if line]
    return [*heads, *parts, text_part("\n")]


def _check_source(source: Source, types: Mapping[str, Sequence[str]], path: str) -> None:
    """Raises `RequestError` for a source of another type, or with other fields."""
    if source.type not in types:
        known = " and ".join(map(repr, types))
        raise RequestError(
            f"{path}: sources of type {source.type[:64]!r} are not supported here, only {known}",
            param=path,
        )
    refuse_all_but(("type", *types[source.type]), source, path)
    for name in types[source.type]:
        if getattr(source, name) is None:
            raise RequestError(f"{path}.{name} is missing", param=f"{path}.{name}")
