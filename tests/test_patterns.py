"""No regex is made of what a client chooses, and none of ours takes longer than its text.

`re` tries one way after the other, holds the interpreter's lock meanwhile, and cannot be told to
end: a pattern with two ways to read a character takes 2 ** n steps for n of them, and one request
stops the server. `make check` runs this.
"""

import ast
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
FILES = [path for name in ("aioserve", "policies") for path in sorted((ROOT / name).rglob("*.py"))]
FLAGS = ("DOTALL", "ASCII", "MULTILINE", "VERBOSE", "IGNORECASE")
CALLS = {"compile", "search", "match", "fullmatch", "split", "findall", "finditer", "sub", "subn"}

#: By file: how many of its patterns are no literal, and why their time is bounded.
MADE = {
    "aioserve/features/formats/call_parser.py": (
        1,
        "words of the code, and repetitions with an end",
    ),
    "aioserve/engine/chat/reply_format.py": (1, "marks of the tokenizer, escaped, one or another"),
    "aioserve/features/formats/harmony.py": (2, "marks that stand in the code, escaped"),
    "aioserve/features/formats/text.py": (1, "marks of a format, escaped, one or another"),
    "aioserve/features/lora/peft_directory.py": (
        2,
        "words of the code; an adapter's, with a time limit",
    ),
    "aioserve/support/files.py": (1, "the name of a log, escaped, and digits"),
    "aioserve/features/multimodal/prompt.py": (1, "marks of the model, escaped, one or another"),
    "aioserve/apis/batches/disk.py": (1, "the kind of a file, which stands in the code"),
    "aioserve/testing/format_rules.py": (1, "marks of a format, escaped, one or another"),
    "aioserve/testing/story.py": (1, "a name of a policy's parts, escaped; in its tests"),
}
_MODULES = "names of modules, as the model has them: a word ends at its dot"
#: Patterns with a repetition in a repetition, and why a text can be read in one way only.
NESTED = {
    r"(?:\w+\.)*layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)_proj": _MODULES,
    r"(?:\w+\.)*embed_tokens": _MODULES,
    r"(?!.*\bvis(?:ion|ual))(?:\w+\.)*?(layers\.\d+\..+|embed_tokens)": _MODULES,
    r"((?:chatcmpl-|cmpl-|embd-|msg_|page-|req-|resp_)[0-9a-f]{8})[0-9a-f]{24}((?:-[0-9]+)*)": (
        "each round begins with a dash, which is no digit"
    ),
}
#: Patterns whose time may grow faster than their text, and who writes that.
STEEP = {
    r"/\S*/lib(?:gomp|iomp5|omp)\b\S*": "libraries of this process, as the system lists them",
}


class Pattern(NamedTuple):
    """A pattern in the code: None if it is no literal."""

    file: str
    line: int
    text: str | bytes | None
    flags: int
    reads: frozenset[str]  # how it is used: search, match, ...


def patterns_in(path: Path) -> Iterator[Pattern]:
    name, tree = str(path.relative_to(ROOT)), ast.parse(path.read_text())
    methods: dict[str, set[str]] = {}  # by name of a compiled pattern
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            methods.setdefault(node.value.id, set()).add(node.attr)
    targets = {  # of `NAME = re.compile(...)`
        node.value: node.targets[0].id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("re", "regex"):
            raise AssertionError(f"{name}:{node.lineno}: import the module, so that this sees it")
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        owner, call = node.func.value, node.func.attr
        if not (isinstance(owner, ast.Name) and owner.id in ("re", "regex") and call in CALLS):
            continue
        first = node.args[0]
        text = first.value if isinstance(first, ast.Constant) else None
        assert text is None or isinstance(text, str | bytes)
        flags = sum(re.RegexFlag[flag] for flag in FLAGS if f"re.{flag}" in ast.unparse(node))
        reads = methods.get(targets.get(node, ""), set()) & CALLS if call == "compile" else {call}
        yield Pattern(name, node.lineno, text, flags, frozenset(reads or {"match"}))


@pytest.fixture(scope="module")
def patterns() -> list[Pattern]:
    return [pattern for path in FILES for pattern in patterns_in(path)]


def test_no_pattern_is_made_of_data_but_where_its_time_is_bounded(patterns: list[Pattern]) -> None:
    made: dict[str, list[int]] = {}
    for pattern in patterns:
        if pattern.text is None:
            made.setdefault(pattern.file, []).append(pattern.line)
    told = "write it as a literal, or search without a regex"
    for file, lines in made.items():
        assert len(lines) <= MADE.get(file, (0, ""))[0], f"{file}, lines {lines}: {told}"
    assert {file: len(lines) for file, lines in made.items()} == {
        f: n for f, (n, _) in MADE.items()
    }


def repeats(parsed: Any, inside: bool = False) -> Iterator[bool]:
    """Of every repetition without an end in a parsed pattern: whether it is in another one."""
    for code, argument in parsed:
        is_repeat = str(code) in ("MAX_REPEAT", "MIN_REPEAT") and int(argument[1]) > 1000
        if is_repeat:
            yield inside
        for part in parts_of(argument):
            yield from repeats(part, inside or is_repeat)


def parts_of(argument: Any) -> Iterator[Any]:
    if isinstance(argument, tuple | list):
        for each in argument:
            yield from parts_of(each)
    elif hasattr(argument, "getwidth"):
        yield argument


def test_no_pattern_repeats_what_repeats(patterns: list[Pattern]) -> None:
    for pattern in patterns:
        if isinstance(pattern.text, str) and pattern.text not in NESTED:
            parsed = re._parser.parse(pattern.text, pattern.flags)  # type: ignore[attr-defined]
            told = f"{pattern.file}:{pattern.line}"
            assert not any(repeats(parsed)), f"{told}: repetitions share a text in many ways"


def pumps(text: str) -> list[str]:
    """What the pattern may read again and again: its own words, and one of each kind."""
    words = re.findall(r"[\w \-`'.$:<>/\\{}(,]+", re.sub(r"\\[wdsSDWbBAZ]", " ", text))
    return sorted({*words, *"a1 _.\n\\$`'/<-", " - at `$", "a.", "a1", "1a", "\\\\"})


def test_the_time_of_a_pattern_grows_with_its_text_alone(patterns: list[Pattern]) -> None:
    """The square of this length would be seconds, where one pass takes a millisecond."""
    for pattern in patterns:
        if isinstance(pattern.text, str) and pattern.text not in STEEP:
            check_time(pattern, pattern.text)


def check_time(pattern: Pattern, text: str) -> None:
    compiled = re.compile(text, pattern.flags)
    # The others read a text as `search` does, from each place.
    reads = {read if read in ("match", "fullmatch") else "search" for read in pattern.reads}
    for pump in pumps(text):
        data = pump.strip()[:1] + pump * (30_000 // len(pump)) + "\0"
        for read in reads:
            began = time.process_time()
            getattr(compiled, read)(data)
            took = time.process_time() - began
            assert took < 0.2, (pattern.file, pattern.line, pump, read)
