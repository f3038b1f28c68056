"""Changes of a policy's text: an option, a number, the order of waiting requests, or by a model.

The changes without a model are made where the syntax tree says, so that comments and the rest of
the file stay as they are. Nothing here runs a policy.
"""

import ast
import difflib
import json
import os
import random
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from aioserve.errors import ConfigError


class Child(NamedTuple):
    """The text of a candidate, and how it came from its parent, in words."""

    source: str
    how: str


class Unanswered(Exception):
    """Raised when a model has answered without text."""


#: By what numbers are multiplied.
FACTORS = (0.25, 0.5, 0.7, 0.85, 1.2, 1.4, 2.0, 4.0)
#: The tokens that a second of waiting is worth, in keys of the order.
WEIGHTS = (5, 20, 50, 100, 200, 500, 1000)
ARRIVAL = "request.arrival_time"
PREDICTED = 'hinted_number(request, "predicted_output_tokens", 200.0)'
#: Keys by which waiting requests are served, the smallest first; `W` is one of `WEIGHTS`.
ORDER_KEYS = (
    ARRIVAL,
    f"(request.priority, {ARRIVAL})",
    f"request.num_prompt_tokens + W * {ARRIVAL}",
    f"{PREDICTED} + W * {ARRIVAL}",
    f"request.num_prompt_tokens + {PREDICTED} + W * {ARRIVAL}",
    f'{ARRIVAL} + hinted_number(request, "slo_ttft", 10.0)',
    f'W * {ARRIVAL} + W * hinted_number(request, "slo_ttft", 10.0) + request.num_prompt_tokens',
)


def mutate(source: str, rng: random.Random) -> Child:
    """Return a policy with one thing changed: an option, another number, or its order, whichever
    of them it has. Raises `ConfigError` for a file that Python cannot parse.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise ConfigError(f"line {error.lineno} of the policy: {error.msg}") from error
    options, numbers = _numbers(tree)
    kinds: list[Callable[[], Child]] = []
    if options:
        kinds.append(lambda: _with_number(source, rng.choice(options), rng))
    if numbers:
        kinds.append(lambda: _with_number(source, rng.choice(numbers), rng))
    if (policy := _policy_class(tree)) is not None:
        kinds.append(lambda: _with_order(source, tree, policy, rng))
    if not kinds:
        raise ConfigError("the policy has no option, no number and no class to change")
    return rng.choice(kinds)()


class _Number(NamedTuple):
    node: ast.expr
    value: float
    name: str  # of the option or variable; "": it has none


def _numbers(tree: ast.Module) -> tuple[list[_Number], list[_Number]]:
    """Return the numbers that are defaults of options, and all others but 0 and 1, which seldom
    are quantities.
    """
    options: list[_Number] = []
    for kind in ast.walk(tree):
        if isinstance(kind, ast.ClassDef) and kind.name == "Options":
            for line in kind.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    options += _number(line.value, line.target.id)
    known = {id(number.node) for number in options}
    others = [n for node in ast.walk(tree) for n in _number(node, "") if id(n.node) not in known]
    return options, [number for number in others if number.value not in (0, 1)]


def _number(node: ast.AST | None, name: str) -> Iterator[_Number]:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        if not isinstance(node.value, bool):
            yield _Number(node, node.value, name)


def _with_number(source: str, number: _Number, rng: random.Random) -> Child:
    value = number.value * rng.choice(FACTORS)
    if isinstance(number.value, int):
        value = round(value)
        if value == number.value:
            value += rng.choice((-1, 1))
        text = str(value)
    else:
        text = f"{value:.4g}"
        text = text if any(c in text for c in ".e") else f"{text}.0"
    name = number.name or f"line {number.node.lineno}"
    return Child(_replaced(source, number.node, text), f"{name}: {number.value:g} to {text}")


def _policy_class(tree: ast.Module) -> ast.ClassDef | None:
    """Return the class with a method `schedule`."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and _method(node, "schedule"):
            return node
    return None


def _method(kind: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    found = (node for node in kind.body if isinstance(node, ast.FunctionDef) and node.name == name)
    return next(found, None)


def _with_order(source: str, tree: ast.Module, policy: ast.ClassDef, rng: random.Random) -> Child:
    weight = str(rng.choice(WEIGHTS))
    key = re.sub(r"\bW\b", weight, rng.choice(ORDER_KEYS))
    body = f'    def order(self, request: "Request") -> object:\n        return {key}\n'
    lines = source.splitlines(keepends=True)
    if (order := _method(policy, "order")) is not None:
        lines[order.lineno - 1 : order.end_lineno] = [body]
    else:
        schedule = _method(policy, "schedule")
        assert schedule is not None, "the class was found by it"
        lines[schedule.lineno - 1 : schedule.lineno - 1] = [f"{body}\n"]
    imported = {
        alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    missing = [n for n in ("Request", "hinted_number") if n in body and n not in imported]
    if missing:
        place = _place_for_imports(tree)
        lines[place:place] = [f"from aioserve.scheduler import {', '.join(missing)}\n"]
    return Child("".join(lines), f"order: {key}")


def _place_for_imports(tree: ast.Module) -> int:
    """Return the number of lines before the first import: those of a docstring and a future."""
    place = 0
    for node in tree.body:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_future = isinstance(node, ast.ImportFrom) and node.module == "__future__"
        if not (is_text or is_future):
            break
        place = node.end_lineno or node.lineno
    return place


def _replaced(source: str, node: ast.expr, text: str) -> str:
    """Return the source with other text in the place of a node, which is within a line."""
    lines = source.splitlines(keepends=True)
    line = lines[node.lineno - 1].encode()
    begin, end = node.col_offset, node.end_col_offset
    lines[node.lineno - 1] = (line[:begin] + text.encode() + line[end:]).decode()
    return "".join(lines)


def changes(source: str, other: str) -> str:
    """Return what differs between two texts, as lines of a unified diff without its head."""
    lines = difflib.unified_diff(source.splitlines(), other.splitlines(), lineterm="", n=1)
    return "\n".join(list(lines)[2:])


# By a language model, which any server of OpenAI's API may be.


KEY = "OPENAI_API_KEY"  # the variable of the environment with the key, if the server wants one
SYSTEM = """\
You improve scheduling policies of a language-model server. A policy is one Python file with one
class that derives from BaseScheduler. It imports from aioserve.scheduler, and of the standard
library only collections, dataclasses, heapq, itertools, math, random and typing. It reads no clock
but self.clock().

What it has: self.waiting (sorted by order), self.running, self.options, self.clock().
What it writes: schedule(), which ends with `return step.output()`; order(request), the key of a
waiting request, the smallest first; victim(), the request to preempt; a class
Options(PolicyOptions).
In schedule(): step = self.new_step(token_budget=N); step.run_decodes() runs the decodes and returns
the requests that are half-way in their prompts; step.run(request, max_tokens); step.admit(request,
max_tokens), which is 0 if it must wait; step.preempt(request); step.token_budget.
A request has: request_id, arrival_time, num_prompt_tokens, num_computed_tokens, num_tokens,
priority, user, hints; hinted_number(request, name, default) reads the hints
predicted_output_tokens, slo_ttft, slo_tpot.
Every request has to end, and none may starve. The length of a reply is not known in advance.
The score is the share of requests that keep their limits of time to first token and between tokens.

Answer with the whole file in one block of ```python.
"""


class Model:
    """A model behind a server of OpenAI's API."""

    def __init__(
        self,
        url: str,
        name: str | None = None,
        *,
        seconds: float = 300.0,
        max_tokens: int | None = None,
    ) -> None:
        """`url` is that of the server, with or without `/v1`; without a `name`, the first model
        that it lists is asked. Raises `ConfigError` if it cannot be reached.
        """
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"--model takes the URL of a server, such as http://127.0.0.1:8000, got {url!r}"
            )
        self._url = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._seconds = seconds
        self._max_tokens = max_tokens
        try:
            self.name = name or self._ask("/models")["data"][0]["id"]
        except (Unanswered, KeyError, IndexError, TypeError) as error:
            raise ConfigError(f"no model at {self._url}/models: {error}") from error

    def rewrite(self, source: str, score: str, stories: Sequence[str]) -> Child:
        """Return the policy that the model writes instead of this one. `score` says in words what
        it reached, `stories` how others failed. Raises `Unanswered` if the server gives no text.
        """
        failures = "\n\n".join(stories)
        told = f"\n\nThese changes of it failed:\n\n{failures}" if failures else ""
        body: dict[str, Any] = {
            "model": self.name,
            "messages": [
                {"role": "system", "content": SYSTEM},
                {
                    "role": "user",
                    "content": f"{score}\n\n```python\n{source}```{told}\n\nWrite a better policy.",
                },
            ],
        }
        if self._max_tokens is not None:
            body["max_tokens"] = self._max_tokens
        answer = self._ask("/chat/completions", body)
        try:
            text = answer["choices"][0]["message"]["content"] or ""
        except (KeyError, IndexError, TypeError) as error:
            raise Unanswered(f"the server's answer has no text: {answer!r:.300}") from error
        return Child(code_in(text), f"by {self.name}")

    def _ask(self, route: str, body: Any = None) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(self._url + route, data, headers)  # noqa: S310 - it is http
        try:
            with urllib.request.urlopen(asked, timeout=self._seconds) as answer:  # noqa: S310
                return json.load(answer)
        except urllib.error.HTTPError as error:
            said = error.read(2000).decode(errors="replace")
            raise Unanswered(f"{self._url}{route} answered {error.code}: {said}") from error
        except (OSError, ValueError) as error:
            raise Unanswered(f"{self._url}{route}: {error}") from error


def code_in(text: str) -> str:
    """Return the longest block of code in a model's answer; without one, all of it."""
    blocks: list[str] = re.findall(r"```[a-z]*\n(.*?)```", text, re.DOTALL)
    return max(blocks, key=len) if blocks else text
