"""What `search` found, in words.

Knows rates and choices; measures nothing.
"""

from collections.abc import Sequence

from aioserve.lab.comparison.candidates import Candidate
from aioserve.lab.comparison.knee import Bound, Knee, Probe
from aioserve.lab.comparison.rows import NOISE, TINY, UNKNOWN, Row, number
from aioserve.lab.search.tuning import DEFAULT, Tuning

#: By the verdict on the held-out part: what is said of the gain.
HOLDS = {
    "better": "The gain holds.",
    "worse": "The gain does not hold: the default is better there.",
    NOISE: "Whether the gain holds cannot be told from noise.",
    TINY: "Hardly any gain is left: less than 1%.",
    UNKNOWN: "Whether the gain holds is open: there is no interval from so little. Take several "
    "seeds, or a longer trace.",
    "the same": "There is no gain: the two do the same there.",
}


def render_probe(probe: Probe) -> str:
    """A rate that was tried, in a line."""
    mark = "" if probe.is_met else "  too fast"
    shown = [] if probe.good_share is None else [f"{100 * probe.good_share:.2f}%"]
    shown += [f"{1e3 * value:.1f}" for value in probe.bounded.values()]
    if probe.worst_class is not None:
        mark = f"  {probe.worst_class} {100 * (probe.worst_class_share or 0):.2f}%{mark}"
    values = "".join(f"  {value:>14}" for value in shown)
    return f"{probe.rate:12.3f}  {probe.time_scale:12.4f}{values}{mark}"


def render_knee(candidate: Candidate, knee: Knee, bounds: Sequence[Bound], *, has_slo: bool) -> str:
    """The highest rate, in a sentence."""
    if knee.rate is None or knee.rate_above is None:
        return f"{candidate.name}: no knee found: {knee.note}"
    whom = "each class" if knee.each_class else "the requests"
    does = [f"meets the SLO for {100 * knee.target:g}% of {whom}"] if has_slo else []
    does += [f"keeps {b.measure} {b.statistic} within {b.limit:g} s" for b in bounds]
    return (
        f"{candidate.name} {' and '.join(does)} up to {knee.rate:.3g} requests/s, and not at "
        f"{knee.rate_above:.3g}"
    )


def render_tuning(tuning: Tuning, row: Row) -> str:
    """The scores of all candidates, what was chosen, and what is left of its gain."""
    better = "more" if row.good > 0 else "less"
    width = max(len(name) for name in (*tuning.candidates, "candidate"))
    lines = [f"{tuning.parts}.", f"{row.label}: {better} is better.", ""]
    lines.append(f"{'':{width}}  {'training':>12}  {'held out':>12}")
    held_out = {DEFAULT: tuning.held_out_default, tuning.chosen: tuning.held_out}
    for name, value in zip(tuning.candidates, tuning.training, strict=True):
        shown = number(held_out[name], row) if name in held_out else ""
        mark = "  chosen" if name == tuning.chosen else ""
        lines.append(f"{name:{width}}  {number(value, row):>12}  {shown:>12}{mark}".rstrip())
    return "\n".join([*lines, "", *_judged(tuning, row)])


def _judged(tuning: Tuning, row: Row) -> list[str]:
    count = len(tuning.candidates)
    if tuning.chosen == DEFAULT:
        return [f"The default is the best of {count} in training: there is nothing to gain."]
    trained, held_out = tuning.gain_in_training, tuning.gain
    lines = [
        f"{tuning.chosen} is the best of {count} in training, by "
        f"{trained.in_words(row)} against the default. That is biased in its favour: it was "
        "chosen for it.",
        f"Held out it has {number(tuning.held_out, row)}, the default "
        f"{number(tuning.held_out_default, row)}: {held_out.in_words(row)}. "
        f"{HOLDS[held_out.verdict]}",
    ]
    if trained.value and held_out.verdict not in (NOISE, UNKNOWN):
        lines.append(
            f"Of the gain in training {100 * held_out.value / trained.value:.0f}% is left."
        )
    return lines
