"""Options that suit a workload, chosen on one part of it and judged on another.

The best of several scores is biased: part of what made it the best is chance, which does not come
again (the winner's curse; Cawley and Talbot, "On Over-fitting in Model Selection", JMLR, 2010). So
the score that counts is that on requests which no choice has seen. Knows scores; runs nothing.
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import msgspec

from aioserve.errors import ConfigError
from aioserve.lab.comparison.arguments import is_list
from aioserve.lab.comparison.candidates import Candidate, load_candidates, options_of
from aioserve.lab.comparison.rows import key
from aioserve.lab.comparison.runs import Apart
from aioserve.lab.search.scores import Scores
from aioserve.lab.search.split import Split
from aioserve.lab.workloads.workload import Workload

DEFAULT = "default"  # the configuration without the values that are searched
Score = Callable[[Sequence[Candidate], Sequence[Workload]], Scores]


class Tuning(msgspec.Struct, frozen=True):
    """What was chosen, and what it is worth; scores are in the unit of the measure's row."""

    parts: str  # what trains and what is held out, in words
    measure: str  # what decided, as `parse_measure` reads it; `rate`: the highest within the SLO
    candidates: list[str]  # the default last
    training: list[float]  # scores, as above
    chosen: str
    held_out: float  # of what was chosen
    held_out_default: float
    gain_in_training: Apart  # over the default
    gain: Apart  # over the default, on the part that is held out


def grid(config: str, settings: Sequence[tuple[str, Any]]) -> list[Candidate]:
    """A candidate for each combination of the values that `settings` list, and the default last:
    the configuration without them. Raises `ConfigError` where a value is not allowed.
    """
    fixed = [(name, value) for name, value in settings if not is_list(value)]
    searched = [(name, value.split(",")) for name, value in settings if is_list(value)]
    found = []
    for values in product(*(values for _, values in searched)):
        own = [(name, v.strip()) for (name, _), v in zip(searched, values, strict=True)]
        [candidate] = load_candidates([config], [*fixed, *own])
        named = " ".join(f"{name.rpartition('.')[2]}={value}" for name, value in own)
        options_of(candidate.config)
        found.append(msgspec.structs.replace(candidate, name=named))
    [default] = load_candidates([config], fixed)
    return [*found, msgspec.structs.replace(default, name=DEFAULT)]


def tune(candidates: Sequence[Candidate], parts: Split, score: Score) -> Tuning:
    """Choose the best candidate on the training part, the default among them, and judge it on the
    part that is held out. Raises `ConfigError` as `score` does.
    """
    in_training = score(candidates, parts.training)
    good, last = in_training.row.good, len(candidates) - 1
    best = max(range(len(candidates)), key=lambda i: (good * in_training.values[i], i == last))
    judged = score([candidates[last], candidates[best]], parts.held_out)
    return Tuning(
        parts.words,
        key(in_training.row),
        [candidate.name for candidate in candidates],
        in_training.values,
        candidates[best].name,
        judged.values[1],
        judged.values[0],
        in_training.apart(last, best),
        judged.apart(0, 1),
    )


def check_values(settings: Sequence[tuple[str, Any]]) -> bool:
    """Whether options are searched. Raises `ConfigError` for a setting that is given twice."""
    names = [name for name, _ in settings]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"--set {min(twice)} is given twice; give its values as A,B,C")
    return any(is_list(value) for _, value in settings)
