"""The types of `aioserve.engine.live_feed` as TypeScript, which the page is checked by.

`python -m tests.server.page.frame_types` writes them anew.
"""

import types
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec

from aioserve.apis.page import FOLDER
from aioserve.engine import live_feed

PATH = Path(FOLDER) / "frames.d.ts"

_PLAIN = {int: "number", float: "number", str: "string", bool: "boolean", type(None): "null"}
_WORDS = {"default: any": "standard: any"}  # a word of JavaScript names no place
_HEAD = "// Written by tests/server/page/frame_types.py, of aioserve/engine/live_feed.py.\n"


def type_of(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if hint in _PLAIN:
        return _PLAIN[hint]
    if origin is list:
        return f"Array<{type_of(args[0])}>"
    if origin is tuple:
        return f"[{', '.join(map(type_of, args))}]"
    if origin is dict:
        return f"{{ [key: string]: {type_of(args[1])} }}"
    if origin in (Union, types.UnionType):
        return " | ".join(map(type_of, args))
    return hint.__name__ if issubclass_of_struct(hint) else "any"


def issubclass_of_struct(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, msgspec.Struct)


def declaration(struct: type[msgspec.Struct]) -> str:
    config = struct.__struct_config__
    hints = get_type_hints(struct)
    fields = [f"{name}: {type_of(hints[name])}" for name in struct.__struct_fields__]
    if config.array_like:
        places = "".join(f"  {_WORDS.get(field, field)},\n" for field in fields)
        return f"export type {struct.__name__} = [\n{places}];\n"
    tag = [f'{config.tag_field}: "{config.tag}"'] if config.tag_field else []
    lines = "".join(f"  {field};\n" for field in tag + fields)
    return f"export type {struct.__name__} = {{\n{lines}}};\n"


def declarations() -> str:
    own = (live_feed.__name__, "aioserve.scheduler.descriptions")  # where `OptionField` stands
    found = [each for each in vars(live_feed).values() if issubclass_of_struct(each)]
    structs = [each for each in found if each.__module__ in own]
    return "\n".join([_HEAD, *map(declaration, structs)])


if __name__ == "__main__":
    PATH.write_text(declarations(), encoding="utf-8")
