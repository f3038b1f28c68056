"""A population of policies on disk, and the search that goes on where it was interrupted.

A folder holds each candidate as a file and a line of JSON for each in `population.jsonl`. The same
seed makes the same candidates for any number of jobs, and after an interruption, as long as no
model writes them. Knows how candidates are made and judged by what `mutation` and an `Evaluator`
say.
"""

import ast
import random
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import msgspec

from aioserve.errors import ConfigError
from aioserve.lab.evaluate import Evaluation, Evaluator, Trials
from aioserve.lab.evolve.mutation import Child, Model, Unanswered, mutate

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
