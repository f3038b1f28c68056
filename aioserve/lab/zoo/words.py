"""The zoo's results as text: the board of all policies, and one policy by every measure.

Knows results and ranks; measures nothing.
"""

from aioserve.lab.comparison.bootstrap import MIN_SEEDS, Sampling, compare_seeds
from aioserve.lab.comparison.rows import Row, number
from aioserve.lab.zoo.measures import IN_TIME, MEASURES, UNFINISHED, key
from aioserve.lab.zoo.standard import WORKLOADS
from aioserve.lab.zoo.standing import OVERALL, Standing, leaderboard, mean_of, rank_of, values_of
from aioserve.lab.zoo.stored import Entry, Results

NUM_NEIGHBOURS = 2  # policies above, and below, that are named beside one


def render_board(results: Results) -> str:
    """A line for each policy, the best overall first."""
    board = leaderboard(results)
    name_width = max(len(standing.name) for standing in board)
    head = [f"{'rank':14}{'policy':{name_width}}"]
    head += [f"{name:>11}" for name in (*WORKLOADS, OVERALL, "us a step")]
    lines = [f"{title(results)}: in time, %", "".join(head)]
    for standing in board:
        cells = [f"{100 * standing.ranks[w].value:11.1f}" for w in (*WORKLOADS, OVERALL)]
        cost = results.policies[standing.name].cost
        cells.append(f"{cost.us:11,.0f}" if cost is not None else f"{'-':>11}")
        lines.append(f"{standing.overall!s:14}{standing.name:{name_width}}{''.join(cells)}")
    return "\n".join(lines)


def title(results: Results) -> str:
    """Version, digest and number of seeds: what makes two results comparable."""
    seeds = num_seeds(results)
    of_seeds = f"{seeds} seeds" if seeds > 1 else "1 seed, so that ranks have no ranges"
    return f"{results.standard} ({results.digest}), {of_seeds}"


def num_seeds(results: Results) -> int:
    """Seeds with which policies were measured: of the one that has the fewest."""
    return min(
        len(values)
        for entry in results.policies.values()
        for of in entry.scores.values()
        for values in of.values()
    )


def render_policy(results: Results, name: str) -> str:
    """One policy: its place, whom it beats, and value and rank by measure and workload."""
    [standing] = [s for s in leaderboard(results) if s.name == name]
    lines = [place_in_words(standing), *against_in_words(results, name)]
    lines += filter(
        None, [unfinished_in_words(results, name), cost_in_words(results.policies[name])]
    )
    lines += ["", f"{'value (rank)':22}" + "".join(f"{w:>17}" for w in WORKLOADS)]
    for row in MEASURES:
        cells = [cell(results, name, workload, row) for workload in WORKLOADS]
        if any(text != "-" for text in cells):
            lines.append(f"{row.label:22}" + "".join(f"{text:>17}" for text in cells))
    return "\n".join(lines)


def place_in_words(standing: Standing) -> str:
    """`Mine: rank 3 (2 to 5) of 26, 71.4% in time over all workloads`."""
    overall = standing.overall
    return (
        f"{standing.name}: rank {overall} of {overall.of}, {100 * overall.value:.1f}% in time over "
        "all workloads"
    )


def cost_in_words(entry: Entry) -> str:
    """What a step of the policy costs; "" if it was not measured."""
    if (cost := entry.cost) is None:
        return ""
    return (
        f"{cost.us:,.0f} microseconds of CPU per schedule() with {cost.running:,} running and "
        f"{cost.waiting:,} waiting, {cost.ratio:.1f} times what chunked_prefill takes "
        f"({cost.machine})"
    )


def against_in_words(results: Results, name: str) -> list[str]:
    """Which policies are worse, better and not told apart, by the share in time overall; of one
    seed, which tells none apart, the nearest ones.
    """
    if num_seeds(results) < MIN_SEEDS:
        return [_between(leaderboard(results), name)]
    kinds: dict[str, list[str]] = {"better than": [], "worse than": [], "not told apart from": []}
    own = values_of(results.policies[name], OVERALL, IN_TIME)
    for other, entry in results.policies.items():
        if other == name:
            continue
        difference = compare_seeds(values_of(entry, OVERALL, IN_TIME), own, Sampling())
        if not difference.is_distinguishable:
            kinds["not told apart from"].append(other)
        else:
            kinds["better than" if difference.value > 0 else "worse than"].append(other)
    return [f"{kind}: {', '.join(names)}" for kind, names in kinds.items() if names]


def _between(board: list[Standing], name: str) -> str:
    """The neighbours of a policy on the board, with their numbers."""
    place = [standing.name for standing in board].index(name)

    def listed(standings: list[Standing]) -> str:
        return ", ".join(f"{s.name} {100 * s.overall.value:.1f}%" for s in standings)

    above = listed(board[max(place - NUM_NEIGHBOURS, 0) : place]) or "none"
    below = listed(board[place + 1 : place + 1 + NUM_NEIGHBOURS]) or "none"
    return (
        f"next above: {above}; next below: {below}; one seed does not say which differences are "
        "chance: leave --quick out"
    )


def unfinished_in_words(results: Results, name: str) -> str:
    """How many requests never ended, and that these count as missed; "" if all did."""
    counts = {w: mean_of(results.policies[name], w, UNFINISHED) for w in WORKLOADS}
    found = [f"{count:,.1f} of {workload}" for workload, count in counts.items() if count]
    if not found:
        return ""
    return f"requests rejected or not finished, which count as late: {', '.join(found)} a seed"


def cell(results: Results, name: str, workload: str, row: Row) -> str:
    """Value and rank, such as `68.0 (5)`; `-`: undefined there."""
    value = mean_of(results.policies[name], workload, row)
    text = number(value * row.factor, row)
    rank = rank_of(results, name, workload, row)
    return text if rank is None else f"{text} ({rank.rank})"


def as_document(results: Results, names: list[str]) -> dict[str, object]:
    """All of it as plain data: the board, and for the named policies each value and rank."""
    return {
        "standard": results.standard,
        "digest": results.digest,
        "seeds": num_seeds(results),
        "aioserve": results.aioserve,
        "workloads": list(WORKLOADS),
        "board": leaderboard(results),
        "policies": {
            name: {
                "cost": results.policies[name].cost,
                "scores": results.policies[name].scores,
                "ranks": {
                    workload: {key(row): rank_of(results, name, workload, row) for row in MEASURES}
                    for workload in WORKLOADS
                },
            }
            for name in names
        },
    }
