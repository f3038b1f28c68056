"""docs/compatibility.md: written from the outcomes of all cells."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.matrix.built import names_of_models
from tests.matrix.features import FEATURES, cells
from tests.matrix.outcomes import NEVER, REFUSED, WORKS, WRONG, Outcome, Outcomes
from tests.matrix.reasons import reason_of
from tests.matrix.settings import CARD, PLACES

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"

_BEGIN = """\
# Which features go together

`make matrix` tests every pair of the features on this page, writes the results to this page, and
fails if a pair is served with wrong results. Each cell of the tables is an engine with a tiny
model with random weights, in float32, on a CPU. About ten requests arrive at random times; they
need more KV blocks than there are, so that some are preempted. Three more requests are aborted
half-way. A cell **works** if

- every token of every reply is the most likely next token according to `transformers` with the
  same weights (merged with the adapter, with penalties, and among the tokens that the grammar
  allows), and log probabilities and vectors equal those of `transformers`. With seeded sampling,
  few-bit weights, int8 activations and a quantized cache, every reply must equal the reply to
  the same request alone in an engine without the other feature;
- the feature was in fact used: drafts were made, prefixes found, requests preempted;
- no request, block, slot or lease is left at the end.

A cell is **refused** if the start, the request or the operator's command is refused with one
line, which is quoted below. A pair of features that have no meaning together **does not apply**.

In these tests the second rank is a thread, and the worker's half of the server is in the same
process; other tests use separate processes. `make test` contains a smaller set of runs in which
every working pair occurs; `make test-all` adds random triples (`tests/matrix`).

{counts}
"""
_TABLE = """
## One process, two ranks, workers

`✓`: the pair works in one process, on two ranks (`--tensor-parallel-size 2`) and behind API
workers (`--api-workers`). Otherwise letters say where it works: `1` in one process, `2` on two
ranks, `w` behind workers. `✗`: it works nowhere. `-`: it does not apply. The diagonal is the
feature alone.

"""
_LETTERS = dict(zip(PLACES, "12w", strict=False))


def render(outcomes: Outcomes) -> str:
    """The page."""
    parts = [_BEGIN.format(counts=_counts(outcomes)), _TABLE, *_table(outcomes)]
    parts.append("\n| | feature | in a run |\n|---|---|---|\n")
    parts += [f"| {i} | {name} | {what} |\n" for i, (name, what) in enumerate(FEATURES.items(), 1)]
    names = names_of_models()
    parts.append(f"\nPairs of two kinds of models are one model each: {names}.\n")
    first, *_ = PLACES
    for place in PLACES:
        own = outcomes[place]
        if place == CARD:
            parts.append(
                "\n## On a CUDA device, by stand-ins\n\nNothing in this table has run on a "
                "card. The CUDA code computed on a stand-in for a device,\nwhose results come as "
                "late as those of a card may ([gpu.md](gpu.md)).\n"
            )
        else:
            parts.append(f"\n## Refused: {place}\n")
        parts += _refused(own, {} if place in (first, CARD) else outcomes[first])
    parts.append("\n## Does not apply\n\n| features | why |\n|---|---|\n")
    parts += _reasons(outcomes[first], NEVER)
    return "".join(parts)


def _counts(outcomes: Outcomes) -> str:
    rows = ["| | works | refused | does not apply |", "|---|---|---|---|"]
    for place, own in outcomes.items():
        count = Counter(outcome.kind for outcome in own.values())
        assert not count[WRONG], "a cell is wrong"
        rows.append(f"| {place} | {count[WORKS]} | {count[REFUSED]} | {count[NEVER]} |")
    return "\n".join(rows)


def _table(outcomes: Outcomes) -> Iterator[str]:
    names = list(FEATURES)
    yield "| | " + " | ".join(str(i + 1) for i in range(len(names))) + " |\n"
    yield "|---" * (len(names) + 1) + "|\n"
    for i, name in enumerate(names):
        marks = [_mark(outcomes, (names[j], name)) for j in range(i)] + [_mark(outcomes, (name,))]
        yield f"| {i + 1} {name} | " + " | ".join(marks + [""] * (len(names) - i - 1)) + " |\n"


def _mark(outcomes: Outcomes, cell: tuple[str, ...]) -> str:
    kinds = {place: outcomes[place][cell].kind for place in _LETTERS}
    if NEVER in kinds.values():
        return "-"
    works = "".join(letter for place, letter in _LETTERS.items() if kinds[place] == WORKS)
    return {"12w": "✓", "": "✗"}.get(works, works)


def _refused(
    own: Mapping[tuple[str, ...], Outcome], known: Mapping[tuple[str, ...], Outcome]
) -> Iterator[str]:
    """A table of what is refused here, and not in `known`."""
    news = {
        cell: outcome
        for cell, outcome in own.items()
        if outcome.kind == REFUSED and known.get(cell) != outcome
    }
    if known:
        yield (
            "\nIn addition to the refusals in one process:\n"
            if news
            else "\nThe same as in one process.\n"
        )
    if news:
        yield "\n| the line | why it stays | features |\n|---|---|---|\n"
        yield from _reasons(news, REFUSED, line_first=True)


def _reasons(
    own: Mapping[tuple[str, ...], Outcome], kind: str, *, line_first: bool = False
) -> Iterator[str]:
    alone = {cell[0] for cell in own if len(cell) == 1 and own[cell].kind == kind}
    found: dict[str, list[str]] = {}
    for cell in cells():
        if (outcome := own.get(cell)) is None or outcome.kind != kind:
            continue
        if len(cell) > 1 and alone & set(cell):  # whatever it is with
            continue
        found.setdefault(outcome.why, []).append(" + ".join(cell))
    for why, names in found.items():
        features = "; ".join(names)
        if line_first:
            line = why.replace("`", "'")
            yield f"| `{line}` | {reason_of(why)} | {features} |\n"
        else:
            yield f"| {features} | {why} |\n"
