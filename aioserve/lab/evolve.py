"""The command `evolve`: a policy in; a population of changed ones in a folder, and the best, out.

Changes without a model are made where the syntax tree says, so that comments and the rest of a file
stay as they are. The folder holds each candidate as a file, and a line of JSON for each in
`population.jsonl`. The same seed makes the same candidates for any number of jobs, and after an
interruption, as long as no model writes them. Candidates are run by an `Evaluator` alone.
"""

import argparse
import ast
import difflib
import json
import os
import random
import re
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from aioserve.errors import ConfigError
from aioserve.lab.comparison.bootstrap import Difference
from aioserve.lab.evaluate import Evaluation, Evaluator, Trials
from aioserve.lab.evaluate.enclosure import Failed
from aioserve.lab.evaluate.evaluator import add_trials, read_policy, read_trials
from aioserve.support.arguments import Parser, count, natural


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


ANSWER_SECONDS = 300.0  # after which a model is not waited for
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
            with urllib.request.urlopen(asked, timeout=ANSWER_SECONDS) as answer:  # noqa: S310
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


# A population on disk, and the search that goes on where it was interrupted.


BATCH = 8  # candidates that are made of one state of the population, and judged side by side
NUM_PARENTS = 8  # the best ones, of which parents are drawn
TWICE = 0.3  # the share of candidates that are changed in two places
ATTEMPTS = 50  # at a candidate that was not there before
NUM_STORIES = 3  # of failures, which a model is told
MAX_STORY = 1200  # characters of each
QUICK, PROVEN = 2, 3  # stages of every candidate, and of one that would be the best so far

FILE, SETTINGS = "population.jsonl", "search.json"


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate policy with the score that it was given."""

    number: int  # 0: the seed; its file has the number as name
    parent: int | None
    how: str  # it was made of its parent
    digest: str
    score: float
    failure: str = ""
    story: str = ""
    is_proven: bool = False  # whether it has kept every rule, and was tried with two futures


class Settings(msgspec.Struct, frozen=True):
    """The settings that make one search: another one has another folder."""

    seed: int
    source: str  # digest of the first policy
    trials: Trials


class Population:
    """The members of a search, in memory and in a folder."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        """Go on with what the folder holds. Raises `ConfigError` if that is another search."""
        self.folder = folder
        self.members: list[Member] = []
        folder.mkdir(parents=True, exist_ok=True)
        known, stated = folder / SETTINGS, msgspec.json.encode(settings)
        if known.exists() and known.read_bytes() != stated:
            raise ConfigError(
                f"{folder} holds a search of another policy, seed or trials: give another --folder"
            )
        known.write_bytes(stated)
        lines = folder / FILE
        if lines.exists():
            found = lines.read_bytes().splitlines(keepends=True)
            whole = [line for line in found if line.endswith(b"\n")]
            lines.write_bytes(b"".join(whole))  # without the line at which it was interrupted
            self.members = [msgspec.json.decode(line, type=Member) for line in whole]

    def add(self, member: Member, source: str) -> None:
        """Keep a member, and its file."""
        (self.folder / f"{member.number:04}.py").write_text(source, encoding="utf-8")
        with (self.folder / FILE).open("ab") as file:
            file.write(msgspec.json.encode(member) + b"\n")
        self.members.append(member)

    def source(self, number: int) -> str:
        """Return the text of a member."""
        return (self.folder / f"{number:04}.py").read_text(encoding="utf-8")

    @property
    def best(self) -> Member:
        """The member with the best score among those that are proven; the seed if there is none."""
        proven = [member for member in self.members if member.is_proven]
        return max(proven or self.members[:1], key=lambda m: (m.score, -m.number))

    def lineage(self, member: Member) -> list[Member]:
        """Return the members of which this one was made, the seed first, and itself."""
        line = [member]
        while line[0].parent is not None:
            line.insert(0, self.members[line[0].parent])
        return line


def digest(source: str) -> str:
    """Return a name for what a text does: that of its syntax tree, if it has one."""
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        source = ast.dump(ast.parse(source))
    return sha256(source.encode()).hexdigest()[:16]


class Search:
    """Makes candidates of the best of a population, and has them judged."""

    def __init__(
        self,
        population: Population,
        evaluator: Evaluator,
        *,
        seed: int = 0,
        model: Model | None = None,
        model_share: float = 1.0,
        jobs: int = 1,
    ) -> None:
        """Make a search; a `model`, if given, writes about `model_share` of the candidates."""
        self.population = population
        self._evaluator = evaluator
        self._seed = seed
        self._model = model
        self._model_share = model_share if model is not None else 0.0
        self._jobs = jobs

    def begin(self, source: str, name: str) -> None:
        """Judge the first policy, unless that was done. Raises `ConfigError` if it fails."""
        if self.population.members:
            return
        found = self._evaluator.evaluate(source, name, PROVEN)
        if found.failure:
            raise ConfigError(
                f"{name} fails before anything is changed ({found.failure}, "
                f"{found.artifacts['failure_stage']}): {found.artifacts['story']}"
            )
        self.population.add(
            _member(0, None, Child(source, "the seed"), found, is_proven=True), source
        )

    def go_on(self, budget: int, report: Callable[[Member], None]) -> None:
        """Judge candidates until there are `budget` of them beside the seed; tell of each."""
        with ThreadPoolExecutor(self._jobs) as pool:
            while (count := len(self.population.members)) <= budget:
                # Those of a batch are made of the members before it, whatever was interrupted.
                first = count - (count - 1) % BATCH
                numbers = range(count, min(first + BATCH, budget + 1))
                before = self.population.members[:first]
                known = {member.digest for member in self.population.members}
                made: list[tuple[int, int, Child | Unanswered]] = []
                for number in numbers:
                    parent, child = self._make(number, before, known)
                    made.append((number, parent.number, child))
                judged = pool.map(lambda each: self._judge(each[2]), made)
                for (number, parent_number, child), found in zip(made, judged, strict=True):
                    report(self._keep(number, parent_number, child, found))

    def _make(
        self, number: int, members: Sequence[Member], known: set[str]
    ) -> tuple[Member, Child | Unanswered]:
        """Return a parent and a candidate that is new, or why a model has written none."""
        rng = random.Random(f"{self._seed} {number}")
        parents = sorted(
            (member for member in members if not member.failure),
            key=lambda member: (-member.score, member.number),
        )[:NUM_PARENTS]
        # The better one of two that are drawn.
        parent = min(rng.choices(range(len(parents)), k=2))
        chosen = parents[parent]
        if rng.random() < self._model_share:
            assert self._model is not None
            stories = [f"{m.how}: {m.story[:MAX_STORY]}" for m in members if m.failure]
            score = f"This policy has {100 * chosen.score:.2f}% of the requests in time."
            try:
                source = self.population.source(chosen.number)
                return chosen, self._model.rewrite(source, score, stories[-NUM_STORIES:])
            except Unanswered as error:
                return chosen, error
        for _ in range(ATTEMPTS):
            child = mutate(self.population.source(chosen.number), rng)
            if rng.random() < TWICE:
                again = mutate(child.source, rng)
                child = Child(again.source, f"{child.how}; {again.how}")
            if (name := digest(child.source)) not in known:
                known.add(name)
                break
        return chosen, child

    def _judge(self, child: Child | Unanswered) -> Evaluation:
        if isinstance(child, Unanswered):
            metrics = {"combined_score": 0.0, "stages_passed": 0.0}
            return Evaluation(metrics, {"failure": "unanswered", "story": str(child)})
        return self._evaluator.evaluate(child.source, "candidate.py", QUICK)

    def _keep(
        self, number: int, parent: int, child: Child | Unanswered, found: Evaluation
    ) -> Member:
        """Keep a candidate, proven if it would be the best; one that then fails has failed."""
        if isinstance(child, Unanswered):
            child = Child("", "by a model")
        is_best = not found.failure and found.score > self.population.best.score
        if is_best:
            found = self._evaluator.evaluate(child.source, "candidate.py", PROVEN)
        is_proven = is_best and not found.failure
        member = _member(number, parent, child, found, is_proven=is_proven)
        self.population.add(member, child.source)
        return member


def _member(
    number: int, parent: int | None, child: Child, found: Evaluation, *, is_proven: bool
) -> Member:
    return Member(
        number=number,
        parent=parent,
        how=child.how,
        digest=digest(child.source),
        score=found.score,
        failure=found.failure,
        story=found.artifacts.get("story", ""),
        is_proven=is_proven,
    )


def count_failures(members: Sequence[Member]) -> dict[str, int]:
    """Return how many members failed in each way, the commonest first."""
    return dict(Counter(m.failure for m in members if m.failure).most_common())


# The command: arguments in, words out.


BEST = "best.py"
MODEL_SHARE = 0.5  # of the candidates, if there is a model


def run_evolve(words: Sequence[str]) -> int:
    """`aioserve evolve`; returns the exit code. Raises `AioserveError`."""
    arguments = _parser().parse_args(words)
    share = MODEL_SHARE if arguments.model_share is None else arguments.model_share
    if not 0 <= share <= 1:
        raise ConfigError(f"--model-share must be from 0 to 1, got {share:g}")
    of_models = (arguments.model_name, arguments.max_tokens, arguments.model_share)
    if arguments.model is None and any(value is not None for value in of_models):
        raise ConfigError(
            "--model-name, --model-share and --max-tokens are for a model: give --model URL"
        )
    source, trials = read_policy(arguments.seed_policy), read_trials(arguments)
    model = None
    if arguments.model is not None:
        model = Model(arguments.model, arguments.model_name, max_tokens=arguments.max_tokens)
    folder = Path(arguments.folder)
    settings = Settings(arguments.random_seed, digest(source), trials)
    with Evaluator(trials, arguments.jobs) as evaluator:
        population = Population(folder, settings)
        search = Search(
            population,
            evaluator,
            seed=arguments.random_seed,
            model=model,
            model_share=share,
            jobs=arguments.jobs,
        )
        search.begin(source, Path(arguments.seed_policy).name)
        if len(population.members) > 1:
            print(f"{folder} has {len(population.members) - 1} candidates already.")
        print(f"The seed has {_share(population.members[0])} of the requests in time.")
        search.go_on(arguments.budget, lambda member: _tell(member, population))
        best = population.best
        (folder / BEST).write_text(population.source(best.number), encoding="utf-8")
        print(_summary(population))
        if best.number:
            print(_judged(evaluator, population.source(best.number), source, len(trials.held_out)))
    return 0


def _parser() -> Parser:
    parser = Parser(
        "evolve",
        description="Search for a policy that has more requests in time: change the options, the "
        "numbers and the order of the best so far, or have a language model write them, and judge "
        "each as `evaluate` does. The population is kept in a folder; the same command goes on "
        "with it. The best one is judged against the first on workloads by which nothing was "
        "chosen.",
    )
    parser.add_argument(
        "--seed",
        dest="seed_policy",
        required=True,
        metavar="FILE",
        help="policy to begin with: a file, or the name of one that ships",
    )
    parser.add_argument(
        "--budget", type=count, default=200, metavar="N", help="candidates in all, without the seed"
    )
    parser.add_argument(
        "--folder", default="evolved", metavar="DIR", help="folder of the population"
    )
    parser.add_argument(
        "--random-seed", type=natural, default=0, metavar="N", help="seed of the changes"
    )
    _add_model(parser)
    add_trials(parser)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("language model")
    group.add_argument(
        "--model",
        metavar="URL",
        help="server of OpenAI's API, such as aioserve itself, whose model writes candidates; its "
        "key is taken from OPENAI_API_KEY",
    )
    group.add_argument(
        "--model-name", metavar="NAME", help="model to ask (default: the first that is listed)"
    )
    group.add_argument(
        "--model-share",
        type=float,
        metavar="X",
        help="share of the candidates that the model writes; the others are changed without it "
        f"(default: {MODEL_SHARE:g})",
    )
    group.add_argument(
        "--max-tokens", type=count, metavar="N", help="tokens of an answer (default: the server's)"
    )


def _share(member: Member) -> str:
    return f"{100 * member.score:.2f}%"


def _tell(member: Member, population: Population) -> None:
    """Print a line for a candidate that is the best so far."""
    if member is population.best:
        print(f"{member.number:5}  {_share(member)}  {member.how}", flush=True)


def _summary(population: Population) -> str:
    best, members = population.best, population.members[1:]
    failures = count_failures(members)
    told = ", ".join(f"{number} {kind}" for kind, number in failures.items()) or "none"
    lines = [f"{len(members)} candidates; failed: {told}."]
    if not best.number:
        return "\n".join([*lines, "None of them is better than the seed."])
    lines.append(f"The best is number {best.number}, with {_share(best)} in time; it was made by:")
    lines += [f"  {m.number:5}  {_share(m)}  {m.how}" for m in population.lineage(best)[1:]]
    lines += ["", changes(population.source(0), population.source(best.number)), ""]
    lines.append(f"It is in {population.folder / BEST}.")
    return "\n".join(lines)


def _judged(evaluator: Evaluator, source: str, seed: str, num_workloads: int) -> str:
    """Return what is left of the gain on workloads by which nothing was chosen."""
    try:
        found = evaluator.gain(source, seed)
    except Failed as error:
        return f"On the held-out workloads it fails: {error.failure}: {error}"
    return f"Held out ({num_workloads} workloads): {_in_words(found)}"


def _in_words(found: Difference) -> str:
    words = f"{100 * found.value:+.2f} points of the requests in time against the seed"
    if found.low is None or found.high is None:
        return f"{words}; give several --held-out-seeds for an interval"
    interval = f"95% interval {100 * found.low:+.2f} to {100 * found.high:+.2f}"
    if not found.is_distinguishable:
        return f"{words} ({interval}): not distinguishable from noise"
    return f"{words} ({interval}): {'better' if found.value > 0 else 'worse'}"
