"""The stored results of the zoo: what each policy that ships reached on the standard workloads.

They come with the package, so that one more policy can be ranked in seconds. They carry the digest
of the standard, and of each policy the digest of its code. Written by `python -m aioserve zoo
--store`. Knows files; measures nothing.
"""

import ast
import importlib.util
import math
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.lab.zoo.cost import Cost
from aioserve.lab.zoo.measures import Scores
from aioserve.lab.zoo.standard import DIGEST, SEEDS, VERSION
from aioserve.scheduler import available_policies
from aioserve.version import __version__

FILE = Path(__file__).with_name(f"{VERSION}.json")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)
AGAIN = "python -m aioserve zoo --store computes them anew"


class Entry(msgspec.Struct, frozen=True):
    """One policy: its scores by workload and measure, a value for each seed, and its cost."""

    code: str  # `code_digest` of the policy
    scores: Scores
    cost: Cost | None = None


class Results(msgspec.Struct, frozen=True):
    """Entries by the policy's name."""

    standard: str = VERSION
    digest: str = DIGEST
    aioserve: str = __version__
    policies: dict[str, Entry] = {}

    def only(self, num_seeds: int) -> "Results":
        """The same of the first seeds alone."""
        policies = {
            name: msgspec.structs.replace(
                entry,
                scores={
                    workload: {measure: values[:num_seeds] for measure, values in of.items()}
                    for workload, of in entry.scores.items()
                },
            )
            for name, entry in self.policies.items()
        }
        return msgspec.structs.replace(self, policies=policies)

    def with_entries(self, entries: dict[str, Entry]) -> "Results":
        """With these in the place of those of the same names, sorted."""
        return msgspec.structs.replace(
            self, policies=dict(sorted({**self.policies, **entries}.items()))
        )


def read_results(path: Path = FILE) -> Results:
    """The stored results. Raises `ConfigError` if there are none, or those of another standard."""
    try:
        found = msgspec.convert(_known(msgspec.json.decode(path.read_bytes())), Results)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"no stored results in {path}: {error}; {AGAIN}") from error
    if (found.standard, found.digest) != (VERSION, DIGEST):
        raise ConfigError(
            f"the stored results in {path} are those of {found.standard} {found.digest}, and the "
            f"standard is {VERSION} {DIGEST}; {AGAIN}"
        )
    return found


def write_results(results: Results, path: Path = FILE) -> None:
    """A line for each policy and workload, so that two changes seldom meet in one."""
    data: dict[str, Any] = msgspec.to_builtins(results)
    lines = []
    for name, entry in data.pop("policies").items():
        scores = entry.pop("scores")
        rows = [f"    {_json(w)}: {_json(of)}" for w, of in scores.items()]
        head = "".join(f"{_json(k)}: {_json(v)}, " for k, v in entry.items())
        lines.append(f'  {_json(name)}: {{{head}"scores": {{\n' + ",\n".join(rows) + "\n  }}")
    head = "".join(f" {_json(k)}: {_json(v)},\n" for k, v in data.items())
    path.write_text(f'{{\n{head} "policies": {{\n' + ",\n".join(lines) + "\n }\n}\n")


def code_digest(name: str) -> str:
    """Of what a policy that ships decides by: its source, and the options of its configuration.
    "": the policy does not ship.
    """
    entry_point = available_policies().get(name)
    module = "" if entry_point is None else entry_point.value.partition(":")[0]
    if not module.startswith("aioserve.policies."):
        return ""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text(encoding="utf-8")
    options = EngineConfig.load(name).scheduler.options
    return sha256(f"{_code(source)}\n{options}".encode()).hexdigest()[:12]


def _code(source: str) -> str:
    """The source without docstrings, comments and empty lines."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node):
            first, last = node.body[0].lineno, node.body[0].end_lineno or node.body[0].lineno
            lines[first - 1 : last] = [""] * (last - first + 1)
    code = [line.partition("  # ")[0].rstrip() for line in lines]
    return "\n".join(line for line in code if line and not line.lstrip().startswith("#"))


def stale(results: Results, names: list[str]) -> list[str]:
    """Of these policies, those that have no results, or whose code is another by now."""
    found = []
    for name in names:
        entry = results.policies.get(name)
        if entry is None or entry.code != code_digest(name):
            found.append(name)
    return found


def has_all_seeds(entry: Entry) -> bool:
    """Whether it was measured with every seed of the standard."""
    return all(len(values) == len(SEEDS) for of in entry.scores.values() for values in of.values())


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _known(data: Any) -> Any:
    """What is undefined is null in the file, and NaN here: in lists, which hold numbers alone."""
    if isinstance(data, dict):
        return {name: _known(value) for name, value in data.items()}
    if isinstance(data, list):
        return [math.nan if value is None else value for value in data]
    return data
