"""Every folder and file with the first sentence of its module: `make tree`, or of some folders.

    python -m tests.tree [aioserve/engine policies ...]

Of a Python file that is the first sentence of its docstring, of a folder that of its package. Other
files stand without one. Shows what lies there and is not hidden or compiled.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

#: The folders of the code, in which every module says what it is in one sentence of this length.
FOLDERS = ("aioserve", "policies", "benchmarks", "examples", "training")
MAX_LENGTH = 100

#: What else the whole tree shows.
OTHERS = ("configs", "deploy", "docs", "requirements", "tests")
WIDTH = 34


def modules() -> list[Path]:
    """The Python files of `FOLDERS`, but for what is made beside them."""
    found = (path for top in FOLDERS for path in sorted((ROOT / top).rglob("*.py")))
    return [path for path in found if not _is_hidden(path)]


def first_sentence(source: str) -> str:
    """Of a module, in one line: to the first full stop, question mark or end of its paragraph."""
    opening = re.match(r'"""(?:[^"\\]|"(?!""))*"""', source)  # the rest need not be parsed
    docstring = ast.get_docstring(ast.parse(opening[0] if opening else source)) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    ended = re.match(r".*?[.?!](?=\s|$)", paragraph)
    return ended[0] if ended else paragraph


def lines(folder: Path, indent: int = 0) -> Iterator[str]:
    """The folder and all below it: a folder's files before its folders."""
    yield _line(folder.name + "/", folder / "__init__.py", indent)
    for path in sorted(folder.iterdir(), key=lambda path: (path.is_dir(), path.name)):
        if path.name == "__init__.py" or _is_hidden(path):
            continue
        if path.is_dir():
            yield from lines(path, indent + 2)
        else:
            yield _line(path.name, path, indent + 2)


def _line(name: str, module: Path, indent: int) -> str:
    is_module = module.suffix == ".py" and module.is_file()
    sentence = first_sentence(module.read_text(encoding="utf-8")) if is_module else ""
    return f"{' ' * indent + name:{WIDTH}} {sentence}".rstrip()


def _is_hidden(path: Path) -> bool:
    """Whether it, or a folder that it lies in, is made by tools and not part of the source."""
    return any(
        name.startswith(".") or name in ("__pycache__", "build") or name.endswith(".egg-info")
        for name in path.relative_to(ROOT).parts
    ) or path.suffix in (".so", ".pyc")


def main(words: list[str]) -> int:
    """Print the tree of these folders, else of all. Returns 2 if one is not there."""
    for word in words or (*FOLDERS, *OTHERS):
        folder = (ROOT / word).resolve()
        if not folder.is_dir() or not folder.is_relative_to(ROOT):
            print(f"{word} is no folder of {ROOT}", file=sys.stderr)
            return 2
        print(*lines(folder), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
