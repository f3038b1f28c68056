"""Arguments that several commands of the lab have: declared once, so that they mean the same.

Knows argparse and what the arguments are for. Knows no command.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from aioserve.errors import ConfigError
from aioserve.lab.slo import StatedSlo
from aioserve.support.arguments import TakesArguments, assignment, count, output_file, positive


def add_settings(
    parser: argparse.ArgumentParser, help: str = "set any setting of serve; repeatable"
) -> None:
    """Add the argument `--set`, a list of (dotted name, value), and `--like`, which adds to it."""
    parser.add_argument(
        "--set",
        metavar="SECTION.NAME=VALUE",
        action="append",
        default=[],
        type=assignment,
        help=help,
    )
    parser.add_argument(
        "--like",
        action="extend",
        dest="set",
        type=_preset,
        metavar="ENGINE",
        help="have requests admitted and preempted as by another engine's scheduler, vllm; a --set "
        "behind it wins (docs/vllm.md)",
    )


def _preset(engine: str) -> list[tuple[str, str]]:
    from aioserve.config.load import preset

    return [(name, str(value)) for name, value in preset(engine, "--like")]


def add_card(parser: argparse.ArgumentParser, *, is_one: bool = True) -> None:
    """Add `--card` and what it needs, which `read_cards` reads; `is_one` if a run has one card."""
    group = parser.add_argument_group("measured card (docs/cards.md)")
    group.add_argument(
        "--card",
        action="append",
        default=[],
        metavar="NAME",
        help="steps take what they take on this card: a ready profile such as h100-llama-3.1-8b, "
        "or with --card-model a card such as h100_sxm; `cards` lists both"
        + ("" if is_one else "; repeatable: every configuration on each"),
    )
    group.add_argument(
        "--card-model",
        metavar="MODEL",
        help="model that the card computes: its name on a hub, or its config.json",
    )
    group.add_argument(
        "--card-tp", type=int, metavar="N", help="cards that share each layer (default: 1)"
    )


def read_cards(arguments: argparse.Namespace) -> list[tuple[str, list[tuple[str, Any]]]]:
    """Return the name of each card that is asked for, and the settings that it stands for; one
    without a name and settings if there is none. Raises `ConfigError`.
    """
    cards: list[str] = arguments.card
    beside = {"model": arguments.card_model, "tp": arguments.card_tp}
    given = {name: value for name, value in beside.items() if value is not None}
    if not cards:
        if given:
            raise ConfigError(f"--card-{next(iter(given))} is for a card: give --card NAME")
        return [("", [])]
    if given.keys() == {"tp"}:
        raise ConfigError(f"--card-tp needs a model: give --card-model beside --card {cards[0]}")
    if getattr(arguments, "live", False):
        raise ConfigError("--card is simulated: give it without --live")
    found = []
    for card in cards:
        profile = ("runner.profile", "card" if given else card)
        options = [("runner.profile_options", {"card": card, **given})] if given else []
        found.append((card, [profile, *options]))
    return found


def read_card(arguments: argparse.Namespace) -> list[tuple[str, Any]]:
    """Return the settings of the one card that is asked for. Raises `ConfigError` for several."""
    cards = read_cards(arguments)
    if len(cards) > 1:
        raise ConfigError("one --card at a time: compare takes several")
    return cards[0][1]


def refuse_card(argv: Sequence[str], why: str) -> None:
    """Refuse `--card` where, for the reason `why`, a card means nothing. Raises `ConfigError`."""
    for word in argv:
        if word.partition("=")[0] in ("--card", "--card-model", "--card-tp"):
            raise ConfigError(f"{word.partition('=')[0]} plays no part here: {why}")


def add_slo(parser: argparse.ArgumentParser) -> None:
    """Add the argument `--slo`, a list of `StatedSlo`."""
    parser.add_argument(
        "--slo",
        action="append",
        default=[],
        type=StatedSlo.parse,
        metavar="[CLASS:]LIMITS",
        help="limits that goodput counts against, for all requests or one class of the workload; "
        "repeatable: chat:ttft=0.5,gap=200ms batch:e2e=60. Seconds, or ms, of ttft, tpot, "
        "e2e, gap (the largest between two tokens of a request); deadline: the "
        "request's own timeout is kept",
    )


def add_time_scale(group: TakesArguments) -> None:
    """Add the argument `--time-scale`, a number above 0."""
    group.add_argument(
        "--time-scale",
        type=positive,
        default=1.0,
        metavar="X",
        help="factor on the times between arrivals; 0.5: twice the request rate",
    )


def add_cut(group: TakesArguments, of: str = "") -> None:
    """Add `--start`, `--duration` and `--limit`, which cut a workload; `of` says of which."""
    group.add_argument(
        "--start", type=float, default=0.0, metavar="S", help=f"seconds of arrivals to skip{of}"
    )
    group.add_argument(
        "--duration",
        type=positive,
        metavar="S",
        help=f"seconds of arrivals to keep{of} (default: all)",
    )
    group.add_argument(
        "--limit", type=count, metavar="N", help=f"requests to keep{of} (default: all)"
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the argument `--json`, which `wants_json` reads."""
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the numbers as JSON too, in the last line (the default without a terminal)",
    )


def wants_json(arguments: argparse.Namespace) -> bool:
    """Return whether the last line of stdout is JSON: asked for, or read by a program."""
    return bool(arguments.json) or not sys.stdout.isatty()


def add_output(parser: TakesArguments, *flags: str, help: str, metavar: str = "FILE") -> None:
    """Add an argument that names a file, written when the work is done."""
    parser.add_argument(*flags, metavar=metavar, type=output_file, help=help)


# Arguments that commands on a workload share: which requests, how many seeds, which settings. Knows
# argparse, and makes workloads of what was given. Runs nothing.
