"""The page of the zoo for docs/: what each policy is for, where it wins, which one to take.

Made of the stored results and of what the policies say of themselves in their docstrings, which
have a fixed shape. Reads sources, and runs and measures nothing.
"""

import ast
import importlib.util
import re
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from aioserve.lab.comparison.measures import IN_TIME
from aioserve.lab.workloads.synthetic import read_spec
from aioserve.lab.zoo.page import joules
from aioserve.lab.zoo.standing import (
    BUDGET,
    FIRST_SEEDS,
    FURTHER_DIGEST,
    FURTHER_SEEDS,
    MEASURES,
    REFERENCE,
    SEEDS,
    SETTINGS,
    TINY,
    VERSION,
    WORKLOADS,
    Rank,
    Results,
    Standing,
    leaderboard,
    mean_of,
    meaning,
    measured_file,
    read_results,
)
from aioserve.scheduler.descriptions import OptionField, read_options
from aioserve.support.files import find_workload
from aioserve.support.plugins import zoo_entry_points

LABELS = ("Paper", "Aim", "Says", "Simplified", "Cost", "Needs")
#: Of the paragraph `Paper`: a year, and a venue or a number of arXiv.
_SOURCE = re.compile(r"(?:19|20)\d\d|'\d\d|arXiv \d{4}\.\d{4,5}")


class Card(msgspec.Struct, frozen=True):
    """A policy of the zoo in words: each paragraph in one line, without its label."""

    name: str  # `zoo.srpt`
    title: str
    paper: str
    aim: str  # what it optimizes
    says: str  # what the paper says
    simplified: str  # what is otherwise here
    cost: str  # of a step
    needs: str
    options: list[OptionField]


def read_card(name: str, source: str) -> Card:
    """Return the card of the policy `name`. Raises `ValueError` that says what of the shape is
    missing.
    """
    docstring = ast.get_docstring(ast.parse(source)) or ""
    title, *paragraphs = (" ".join(part.split()) for part in docstring.split("\n\n"))
    found = [text.partition(": ")[::2] for text in paragraphs]
    labels = tuple(label for label, _ in found)
    if labels != LABELS or not all(text for _, text in found):
        raise ValueError(
            f"the docstring of {name} must have the paragraphs {', '.join(LABELS)} after its first "
            f"sentence, each with its label, a colon and a text; got {', '.join(labels) or 'none'}"
        )
    parts = {label.lower(): text for label, text in found}
    if not title.endswith(".") or _SOURCE.search(title) is None:
        raise ValueError(f"the first sentence of {name} must name a paper and its year: {title!r}")
    if _SOURCE.search(parts["paper"]) is None:
        raise ValueError(f"{name}: Paper must have a year, or a number such as arXiv 2410.01035")
    return Card(name, title, **parts, options=read_options(source))


def read_cards() -> list[Card]:
    """Return the cards of all policies of the zoo, sorted by name. Raises `ValueError` as above."""
    cards = []
    for entry_point in zoo_entry_points():
        spec = importlib.util.find_spec(entry_point.value)
        assert spec is not None
        assert spec.origin is not None
        cards.append(read_card(entry_point.name, Path(spec.origin).read_text(encoding="utf-8")))
    return cards


# What the page says in words: its head, its questions, and the nine in short.


HEAD = """\
# The zoo: published schedulers on the same workloads

`python docs/make_zoo.py` writes this page from stored results, and a test keeps it current. The
zoo has {published} schedulers of papers and other engines, one file each in
[policies/zoo](../policies/zoo). With the nine of [policies.md](policies.md), {policies} policies
are compared on one engine in virtual time, on {workloads} workloads with {seeds} seeds each. Any
of them runs on a server (`zoo.greenllm` only with `--runner simulated`, which has a clock to set):
`python -m aioserve --policy zoo.srpt`, or `--config zoo.srpt` for the file in
[configs/zoo](../configs/zoo).

{measured}

```bash
python -m aioserve zoo path/to/mine.py:Mine --html mine.html   # yours: half a minute on two cores
python -m aioserve zoo zoo.srpt fcfs --quick                   # a first look with one seed
python -m aioserve zoo                                         # measure all again: some minutes
```

The next command prints a cell of two rows by every measure of `compare`, with the intervals of
their differences. Its row *in time* is the number of the cell; where a workload has one class,
that is *within the SLO*:

```bash
python -m aioserve compare fcfs zoo.srpt --config zoo-1 \\
    --workload zoo-1-chat --seed 1 --seeds {seeds}
```

The workloads, seeds and step times are frozen as **{standard}**, digest `{digest}`{further}:
results with this digest can be compared. The ranking measure is **in time**: the share of requests,
and of programs of agents, that met all [limits](#the-limits-in-seconds) of their class. It is the
mean over the classes of a workload, so a few long documents count as much as many chats. The load
of every workload is near the engine's capacity, where policies differ.

![Share of requests in time, by policy and workload](zoo.svg)

A frame marks a policy if no other one is surely better on that workload. All pairs of policies of
a column are tested at once: Student's test of the differences, seed by seed, with Holm's
correction ([Holm, 1979](https://www.jstor.org/stable/4615733)), so that with a probability of 95%
no frame of the column is missing by chance. A frame means that {seeds} seeds cannot decide the
question, not that the policies are equal: a policy whose shares vary from seed to seed may have a
frame where another one with the same mean has none.
"""

FURTHER = f" (seeds 1 to {len(FIRST_SEEDS)}; the seeds from {FURTHER_SEEDS[0]} on have the digest \
`{FURTHER_DIGEST}`)"

LIMITS = """\
The limits are those of `configs/workloads/{standard}-*.yaml`. TTFT is the time to the first
token, TPOT the mean time for each token after it, gap the longest time between two tokens of the
request, end to end the time to the last token, and program the time from the first arrival of an
agent's program to its last token, including pauses for tools. An empty cell means no limit.
"""


class Question(NamedTuple):
    """A question, the workload whose numbers answer it, and the policies that it leaves."""

    asks: str
    workload: str
    among: Literal["any", "lengths", "nothing"]
    why: str


QUESTIONS = [
    Question(
        "1. Do you serve both long documents and chats?",
        "documents",
        "any",
        "A prompt of 20,000 tokens takes seconds: it must neither stall the streams nor wait for "
        "ever.",
    ),
    Question(
        "2. Are your clients agents, whose programs are many requests?",
        "agents",
        "any",
        "The last token of the program counts, and prefixes are used again after each tool.",
    ),
    Question(
        "3. Is there offline work, such as batches?",
        "offline",
        "any",
        "It should use the capacity that online requests leave, and be preempted by their bursts.",
    ),
    Question(
        "4. Do tenants share the engine, some of which flood it?",
        "tenants",
        "any",
        "Also look at *service apart*, the difference in service between tenants.",
    ),
    Question(
        "5. None of these, only chats. Can you predict the lengths of replies? If so:",
        "chat",
        "lengths",
        "These policies need predicted lengths, or nothing. The predictions are wrong by a "
        "log-normal factor with sigma 0.5: two of three are within a factor of 1.65. [With other "
        "errors](robustness.md)",
    ),
    Question(
        "If not, and requests have no other hints:",
        "chat",
        "nothing",
        "These policies use only arrival, prompt, progress, cache and step time. The limits of "
        "this workload are the defaults of `deadline`: set your own.",
    ),
]

MACHINE = """\
**rank**: by the share in time over all workloads; in parentheses the range of possible ranks:
with a probability of 95% all ranges hold, because all pairs of policies are tested at once (Holm).
**wins**, **loses**: workloads on which the policy is significantly in the first, or last, quarter
of all. **us a step**: microseconds of CPU for one `schedule()` with 1,000 requests running and
10,000 waiting, of which 15 end and 15 arrive in each step; **ratio**: this time divided by that
of `chunked_prefill` in the same run ({costs}).
Read the ratio, not the time{mixed}.{twin}

Keep in mind: step times are computed from a data sheet (`{standard}` in
`aioserve/runner/profiles`), not measured on a card. The policies have the defaults of their
papers, if stated, and were not tuned to a workload. A policy that needs hints which these
requests lack cannot show its full benefit. A step has at most {budget} tokens, including decodes,
under every policy: a policy that adapts its steps uses smaller ones, and one that runs whole
prompts (`runs_whole_prompts`) has room for the longest. A request that is rejected or not
finished counts as late, so rejecting improves no policy's rank. Times to first token and to the
end are those of requests that got there, so also look at *unfinished requests*.

The report of `python -m aioserve zoo NAME --html FILE` has all measures of a policy, with ranks:
"""

#: What is added where not all costs were measured on one machine and day.
MIXED = """, and compare it across machines only roughly; the command
`python -m aioserve zoo --store --only costs` measures all of them anew"""

#: Of the nine policies: what each optimizes, and what it needs.
NINE = {
    "chunked_prefill": ("steady streams", "nothing"),
    "deadline": ("the most requests within one time to first token and one pace", "nothing"),
    "fair": ("the same service for each client", "clients (the request's user)"),
    "fcfs": ("order of arrival; whole prompts", "nothing"),
    "hrrn": ("early first tokens without starvation", "nothing"),
    "latency_budget": ("a bound on the gaps between tokens", "nothing"),
    "mlfq": ("early ends of short replies, without predictions", "nothing"),
    "prefix_aged": ("cache hits without starvation", "nothing"),
    "priority": ("urgent requests first", "priorities (of the request)"),
}


# The page, made of the stored results and of what the policies say of themselves.


#: The cards of which results may be stored beside those of the standard's machine.
MEASURED_CARDS = ("h100-llama-3.1-8b", "h100x4-llama-3.1-70b-fp8")
NUM_MOVED = 4  # policies that moved most, which are named
BOUNDED = 30  # times faster, from which arrivals do not make a workload of conversations harder
MEASURED_WORDS = """\
The ranking {moves} on measured [cards](cards.md): with a card's memory, 256 seats and one
step planned at a time, {agreeing} of the pairs of policies are in the order that they have here
with the same seeds. Two single seeds of this page agree about {least_seeds} to {most_seeds} of the
pairs, so {chance}.
{cards}
Requests come faster there, so that `{reference}` serves as many in time as here. Energy hardly
tells policies apart, unless one sets the card's clock, whose effect is
[assumed](cards.md#prices-and-energy). `python -m aioserve zoo --card NAME{option}` prints a
ranking{missing}."""
CARD_WORDS = """\
On {machine}, with {seeds}, `{first}` is first of {num} (here {before}); moves: {moved}.
Requests come {faster} times faster{bounded}. An output token takes \
{least} joules under `{thrifty}`, and {next} to {most} under the others."""
BOUNDED_WORDS = (
    "; {workloads} are easier at any rate, as pauses between turns stay, and without them "
    "{without} of the pairs are in the order that they have here"
)
MAX_NAMED = 3  # policies that a question names
QUARTER = 4  # a policy wins where it is in the first quarter, whatever chance does


def render(results: Results) -> str:
    """Return the page `zoo.md`; `zoo.svg` stands beside it."""
    cards = {card.name: card for card in read_cards()}
    board = leaderboard(results)
    parts = [
        HEAD.format(
            policies=len(board),
            published=len(cards),
            workloads=len(WORKLOADS),
            seeds=results.num_seeds,
            standard=results.standard,
            digest=results.digest,
            further=FURTHER if results.num_seeds > len(FIRST_SEEDS) else "",
            measured=_measured(results),
        ),
        *_limits(),
        *_questions(results, board, cards),
        *_table(results, board, cards),
        MACHINE.format(
            standard=results.standard,
            costs="; ".join(_machines(results)),
            mixed=MIXED if len(_machines(results)) > 1 else "",
            twin=_twin(results),
            budget=dict(SETTINGS)[BUDGET],
        ),
        *[f"- **{row.label}**: {meaning(row)}" for row in MEASURES],
        "",
        "## The published policies\n",
        *[_described(card) for card in cards.values()],
    ]
    return "\n".join(parts).rstrip() + "\n"


def _measured(results: Results) -> str:
    """Return whether the ranking is another one on measured cards, by the seeds that both have, and
    whether by more than two seeds of the standard's machine differ.
    """
    missing = [card for card in MEASURED_CARDS if not measured_file(card).exists()]
    boards = [read_results(measured_file(c)) for c in MEASURED_CARDS if c not in missing]
    agreeing = [_agreeing(results.only(board.num_seeds), board, WORKLOADS) for board in boards]
    of_seeds = [
        _agreeing(results.only(1, a), results.only(1, b), WORKLOADS)
        for a, b in combinations(range(results.num_seeds), 2)
    ]
    moves = max(agreeing) < min(of_seeds)
    fewest = min(board.num_seeds for board in boards)
    return MEASURED_WORDS.format(
        moves="moves" if moves else "hardly moves",
        agreeing=" and ".join(f"{100 * share:.0f}%" for share in agreeing),
        least_seeds=f"{100 * min(of_seeds):.0f}",
        most_seeds=f"{100 * max(of_seeds):.0f}%",
        chance="it is not by chance alone" if moves else "it may be by chance",
        cards="\n".join(_on_card(results, board) for board in boards),
        reference=REFERENCE,
        option=f" --seeds {fewest}" if fewest < len(SEEDS) else "",
        missing="".join(f"; `{card}` has not been run yet" for card in missing),
    )


def _on_card(results: Results, there: Results) -> str:
    """Return what is otherwise on one measured card, among the policies that both have."""
    seeds, names = there.num_seeds, results.policies.keys() & there.policies.keys()
    here, there = (
        msgspec.structs.replace(
            board, policies={name: e for name, e in board.policies.items() if name in names}
        )
        for board in (results.only(seeds), there)
    )
    old, new = _places(here), _places(there)
    shared = sorted(names, key=lambda name: (-abs(new[name] - old[name]), name))
    frugal = sorted(names, key=lambda name: (joules(there.policies[name]), name))
    energy = [joules(there.policies[name]) for name in frugal]
    fastest = {w: 1 / scale for w, scale in there.scales.items()}
    bounded = [w for w, faster in fastest.items() if faster > BOUNDED]
    others = {w: faster for w, faster in fastest.items() if w not in bounded}
    first = min(new, key=lambda name: (new[name], name))
    return CARD_WORDS.format(
        machine=there.machine,
        seeds=f"{seeds} seed" + "s" * (seeds > 1),
        first=first,
        before=old[first],
        num=len(names),
        moved=", ".join(f"`{n}` from {old[n]} to {new[n]}" for n in shared[:NUM_MOVED]),
        faster=f"{min(others.values()):.0f} to {max(others.values()):.0f}",
        bounded=""
        if not bounded
        else BOUNDED_WORDS.format(
            workloads=" and ".join(bounded),
            without=f"{100 * _agreeing(here, there, list(others)):.0f}%",
        ),
        least=f"{energy[0]:.3f}",
        thrifty=frugal[0],
        next=f"{energy[1]:.3f}",
        most=f"{energy[-1]:.3f}",
    )


def _places(results: Results) -> dict[str, int]:
    return {standing.name: standing.overall.rank for standing in leaderboard(results)}


def _agreeing(one: Results, other: Results, workloads: Sequence[str]) -> float:
    """Return the share of the pairs of policies, of those not equal in either, whose order by the
    mean share in time over the workloads is the same in both.
    """

    def means(results: Results) -> dict[str, float]:
        return {
            name: sum(mean_of(entry, workload, IN_TIME) for workload in workloads)
            for name, entry in results.policies.items()
        }

    here, there = means(one), means(other)
    shared = sorted(here.keys() & there.keys())
    apart = [
        (here[a] - here[b]) * (there[a] - there[b])
        for a, b in combinations(shared, 2)
        if abs(here[a] - here[b]) > TINY and abs(there[a] - there[b]) > TINY
    ]
    return sum(product > 0 for product in apart) / len(apart)


def _limits() -> list[str]:
    """Return the limits of each class of the workloads, in seconds, as their files state them."""
    names = {
        "ttft": "TTFT",
        "tpot": "TPOT",
        "gap": "gap",
        "e2e": "end to end",
        "program": "program",
    }
    lines = ["## The limits, in seconds\n", f"| workload | class | {' | '.join(names.values())} |"]
    lines.append("|---" * (2 + len(names)) + "|")
    for workload in WORKLOADS:
        for kind in read_spec(find_workload(f"{VERSION}-{workload}")).classes:
            limits = [getattr(kind.slo, name, None) for name in names]
            cells = ["" if limit is None else f"{limit:g}" for limit in limits]
            lines.append(f"| {workload} | {kind.name} | {' | '.join(cells)} |")
    return [*lines, "", LIMITS.format(standard=VERSION)]


def needs_of(name: str, cards: dict[str, Card]) -> str:
    """Return what a policy has to be told, in a cell."""
    return cards[name].needs.rstrip(".") if name in cards else NINE[name][1]


def _questions(results: Results, board: Sequence[Standing], cards: dict[str, Card]) -> list[str]:
    lines = ["## Which policy for me?\n", "| question | first of these, by their numbers | |"]
    lines.append("|---|---|---|")
    for question in QUESTIONS:
        found = _answer(results, board, cards, question)
        named = "<br>".join(f"`{name}` {rank.value * 100:.0f}%" for name, rank in found)
        lines.append(f"| {question.asks} | {named} | {question.why} |")
    best = board[0].overall
    lines += [
        "",
        "Numbers are shares in time on the workload of the question, of the policies with the most "
        "of it. Chance may have put them before another one: the frames in the chart have all to "
        "which no policy is surely better. "
        f"Over all workloads the first, `{board[0].name}`, has {100 * best.value:.0f}%.\n",
    ]
    return lines


def _answer(
    results: Results, board: Sequence[Standing], cards: dict[str, Card], question: Question
) -> list[tuple[str, Rank]]:
    """Return the best policies for a question, among those that it leaves."""
    is_left: Callable[[str], bool] = {
        "any": lambda name: True,
        "lengths": lambda name: needs_of(name, cards).startswith(("nothing", "predicted lengths")),
        "nothing": lambda name: needs_of(name, cards).startswith("nothing"),
    }[question.among]
    left = [standing for standing in board if is_left(standing.name)]
    left.sort(key=lambda s: (s.ranks[question.workload].rank, s.overall.rank))
    return [(s.name, s.ranks[question.workload]) for s in left[:MAX_NAMED]]


def _table(results: Results, board: Sequence[Standing], cards: dict[str, Card]) -> list[str]:
    lines = [
        "## All policies\n",
        "| rank | policy | optimizes | needs | wins | loses | in time, % | us a step | ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for standing in board:
        name = standing.name
        aim = cards[name].aim.rstrip(".") if name in cards else NINE[name][0]
        page = f"#{anchor(name)}" if name in cards else f"policies.md#{name}"
        wins, loses = _outcomes(standing)
        cost = results.policies[name].cost
        costs = "- | -" if cost is None else f"{cost.us:,.0f} | {cost.ratio:.1f}"
        lines.append(
            f"| {standing.overall} | [{name}]({page}) | {aim} | {needs_of(name, cards)} | "
            f"{wins} | {loses} | {100 * standing.overall.value:.1f} | {costs} |"
        )
    return [*lines, ""]


def anchor(name: str) -> str:
    """Return the anchor of a policy's heading, as GitHub and the site's generator make it."""
    return name.replace(".", "")


def _outcomes(standing: Standing) -> tuple[str, str]:
    """Workloads on which it is surely in the first, and in the last quarter of the policies."""
    ranks = {w: standing.ranks[w] for w in WORKLOADS}
    wins = [w for w, rank in ranks.items() if rank.worst * QUARTER <= rank.of]
    loses = [w for w, rank in ranks.items() if (rank.of - rank.best + 1) * QUARTER <= rank.of]
    return ", ".join(wins), ", ".join(loses)


def _twin(results: Results) -> str:
    """Return what says how far to trust costs: the reference beside itself, if it was measured."""
    cost = results.policies[REFERENCE].cost
    if cost is None:
        return ""
    return f" `{REFERENCE}` beside itself has {cost.ratio:.2f}: differences of a tenth say nothing."


def _machines(results: Results) -> list[str]:
    """Return the machines, with their days, on which costs were measured."""
    costs = [entry.cost for entry in results.policies.values() if entry.cost is not None]
    return sorted({cost.machine for cost in costs})


def _described(card: Card) -> str:
    lines = [f"### {card.name}\n", f"**{card.title}**\n"]
    says = card.says[:1].upper() + card.says[1:]
    lines += [f"{card.paper} {says}\n", f"*Simplified:* {card.simplified}\n"]
    lines += [f"*Cost of a step:* {card.cost}\n"]
    if card.options:
        lines += ["| option | default | |", "|---|---|---|"]
        lines += [f"| `{o.name}` | `{o.default!r}` | {o.note} |" for o in card.options]
        lines.append("")
    return "\n".join(lines)
