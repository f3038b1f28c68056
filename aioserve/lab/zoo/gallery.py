"""The page of the zoo for docs/: what each policy is for, where it wins, which one to take.

Made of the stored results and of what the policies say of themselves. Measures nothing.
"""

from collections.abc import Callable, Sequence

from aioserve.lab.workloads.synthetic_spec import read_spec
from aioserve.lab.zoo.cards import Card, read_cards
from aioserve.lab.zoo.gallery_text import HEAD, LIMITS, MACHINE, NINE, QUESTIONS, Question
from aioserve.lab.zoo.measures import MEASURES, meaning
from aioserve.lab.zoo.standard import BUDGET, SEEDS, SETTINGS, VERSION, WORKLOADS
from aioserve.lab.zoo.standing import Rank, Standing, leaderboard
from aioserve.lab.zoo.stored import Results
from aioserve.shipped import find_workload

MAX_NAMED = 3  # policies that a question names
QUARTER = 4  # a policy wins where it is in the first quarter, whatever chance does


def render(results: Results) -> str:
    """The page `zoo.md`; `zoo.svg` stands beside it."""
    cards = {card.name: card for card in read_cards()}
    board = leaderboard(results)
    parts = [
        HEAD.format(
            policies=len(board),
            published=len(cards),
            workloads=len(WORKLOADS),
            seeds=len(SEEDS),
            standard=results.standard,
            digest=results.digest,
        ),
        *_limits(),
        *_questions(results, board, cards),
        *_table(results, board, cards),
        MACHINE.format(
            standard=results.standard, costs=_machines(results), budget=dict(SETTINGS)[BUDGET]
        ),
        *[f"- **{row.label}**: {meaning(row)}" for row in MEASURES],
        "",
        "## The published policies\n",
        *[_described(card) for card in cards.values()],
    ]
    return "\n".join(parts).rstrip() + "\n"


def _limits() -> list[str]:
    """The limits of each class of the workloads, in seconds, as their files state them."""
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
    """What a policy has to be told, in a cell."""
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
    """The best policies for a question, among those that it leaves."""
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
    """Of the heading of a policy, as GitHub and the site's generator make it."""
    return name.replace(".", "")


def _outcomes(standing: Standing) -> tuple[str, str]:
    """Workloads on which it is surely in the first, and in the last quarter of the policies."""
    ranks = {w: standing.ranks[w] for w in WORKLOADS}
    wins = [w for w, rank in ranks.items() if rank.worst * QUARTER <= rank.of]
    loses = [w for w, rank in ranks.items() if (rank.of - rank.best + 1) * QUARTER <= rank.of]
    return ", ".join(wins), ", ".join(loses)


def _machines(results: Results) -> str:
    costs = [entry.cost for entry in results.policies.values() if entry.cost is not None]
    return "; ".join(sorted({cost.machine for cost in costs}))


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
