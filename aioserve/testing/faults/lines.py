"""Every point of a request's way at which something may be raised: a list made from the code.

A point is a line that awaits, one that calls back, or the first line of what is called back. A
fault there is raised by the interpreter itself, as that line begins: no part is replaced. Knows
syntax trees and tracing; knows nothing about what the lines do.
"""

import ast
import asyncio
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import msgspec

import aioserve
from aioserve.testing.faults.fault import Fault, Faults, planted

ROOT = Path(aioserve.__file__).parent

#: The files of a request's way, in its order.
WAY = (
    *("server/middleware.py", "server/access/gate.py", "server/body.py"),
    *("server/completions.py", "server/chat/routes.py", "server/generation.py"),
    *("server/running.py",),
    *("engine/client.py", "engine/input_processor.py", "engine/admission.py"),
    *("engine/async_engine.py", "engine/stream.py", "engine/output_processor.py"),
    *("engine/core.py", "engine/step_loop.py", "engine/metrics.py", "engine/request_log.py"),
)


class Point(msgspec.Struct, frozen=True):
    """A line of a file below `aioserve`, and in which function it stands."""

    path: str
    line: int
    function: str
    what: str  # "awaits", "calls back" or "is called back"

    @property
    def part(self) -> str:
        """The name of the point, as faults use it."""
        return f"{self.path}:{self.line} {self.function} {self.what}"


@cache
def points(paths: tuple[str, ...] = WAY) -> tuple[Point, ...]:
    """Return all points of the given files, in order."""
    found: dict[tuple[str, int], Point] = {}
    for path in paths:
        file = ROOT / path
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for point in _Points(path, tree).all():
            found.setdefault((point.path, point.line), point)
    return tuple(found.values())


class _Points:
    """The points of one file, in order."""

    def __init__(self, path: str, tree: ast.Module) -> None:
        self._path, self._tree = path, tree
        functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
        self._functions = {function.name: function for function in functions}
        self._given = {name for function in functions for name in _kept(function)}

    def all(self) -> Iterator[Point]:
        for function in ast.walk(self._tree):
            if isinstance(function, ast.AsyncFunctionDef | ast.FunctionDef):
                yield from self._of(function)

    def _of(self, function: ast.AsyncFunctionDef | ast.FunctionDef) -> Iterator[Point]:
        given = {argument.arg for argument in function.args.args}
        for node in _own_nodes(function):
            if isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith):
                yield self._point(node, function, "awaits")
            if not isinstance(node, ast.Call):
                continue
            called, own = node.func, _name_of_own(node.func)
            # A function that it was given, or that its object was made with.
            if (isinstance(called, ast.Name) and called.id in given) or own in self._given:
                yield self._point(node, function, "calls back")
            for argument in [*node.args, *(keyword.value for keyword in node.keywords)]:
                if (callback := self._callback(argument)) is not None:
                    yield self._point(_first(callback), callback, "is called back")

    def _callback(self, argument: ast.expr) -> ast.FunctionDef | None:
        """Return the method or function of this file that is handed over as such."""
        if name := _name_of_own(argument):
            return self._functions.get(name)
        return self._functions.get(argument.id) if isinstance(argument, ast.Name) else None

    def _point(self, node: Any, function: Any, what: str) -> Point:
        return Point(self._path, node.lineno, function.name, what)


def _name_of_own(node: ast.expr) -> str:
    """Return the name `x` of `self.x`; empty for all other expressions."""
    is_own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    return node.attr if is_own and node.value.id == "self" else ""  # type: ignore[attr-defined]


def _kept(function: ast.FunctionDef) -> Iterator[str]:
    """Yield what an object keeps, as it is, of what it was made with: `x` of `self.x = y`."""
    if function.name != "__init__":
        return
    given = {argument.arg for argument in [*function.args.args, *function.args.kwonlyargs]}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            if node.value.id in given and len(node.targets) == 1:
                yield _name_of_own(node.targets[0])


def _first(function: ast.FunctionDef) -> ast.stmt:
    """Behind what it says of itself."""
    body = function.body
    return body[1] if ast.get_docstring(function) is not None and len(body) > 1 else body[0]


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Yield all below it, but for what functions in it are made of."""
    for child in ast.iter_child_nodes(function):
        yield child
        if not isinstance(child, ast.AsyncFunctionDef | ast.FunctionDef | ast.Lambda):
            yield from _own_nodes(child)


class FaultyLines:
    """A block that raises the faults of points, in the thread that enters it, for as long as it is
    entered.

    A debugger or a coverage of that thread is set aside meanwhile.
    """

    def __init__(self, faults: Faults, among: Iterable[Point]) -> None:
        self._faults = faults
        self._points = {(str(ROOT / point.path), point.line): point for point in among}
        self._files = {file for file, _ in self._points}
        self._before: Any = None
        #: Points that were passed, with and without a fault.
        self.passed: set[Point] = set()

    def __enter__(self) -> "FaultyLines":
        self._before = sys.gettrace()
        sys.settrace(self._on_call)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        sys.settrace(self._before)

    def _on_call(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        frame.f_trace_opcodes = False
        return self._on_line

    def _on_line(self, frame: FrameType, event: str, _: Any) -> Any:
        point = self._points.get((frame.f_code.co_filename, frame.f_lineno))
        if event == "line" and point is not None:
            self.passed.add(point)
            kind = self._faults.comes(point.part)
            if kind is not None:
                # What a trace function raises ends all tracing: it goes on with the next callback.
                asyncio.get_running_loop().call_soon(sys.settrace, self._on_call)
                raise planted(kind, point.part)
        return self._on_line


def fault_at(point: Point, kind: str, after: int = 0) -> Fault:
    """Return the fault that raises at a point."""
    return Fault(point.part, kind, after)
