"""The commands that read a decision log: `replay` and `trace`.

Arguments in, words out. Exit code 0: it agrees; 1: it does not; 2 (by the caller, for a
`ConfigError`): the log or a setting cannot be used.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError
from aioserve.lab.arguments import (
    add_card,
    add_json,
    add_output,
    add_settings,
    read_card,
    refuse_card,
    wants_json,
)
from aioserve.lab.decision_log.reader import DecisionLog
from aioserve.lab.decision_log.replay import Divergence, replay
from aioserve.lab.logs.perfetto import write_trace
from aioserve.lab.logs.what_if import Measures, WhatIf, what_if
from aioserve.lab.terminal import legend
from aioserve.runner.step_times import machine_in_words, step_times
from aioserve.support.arguments import Parser

# Of these the relative difference between reality and simulation says how far to trust the rest.
# What a policy is chosen by: of these the error of the simulation is said.
CHECKED = (*("TTFT mean ms", "TTFT p99 ms", "gap p99 ms", "e2e mean ms", "e2e p99 ms", "tokens/s"),)
TRUSTED_ERROR = 0.15


def run_replay(argv: Sequence[str]) -> int:
    """`python -m aioserve replay FILE [--policy P] [--set ...]`; returns the exit code.

    Raises `ConfigError`.
    """
    parser = Parser(
        "replay",
        description="Check that today's code decides as recorded, step by step. With --policy, "
        "--set or --card: what another policy, or the recorded one on another machine, would have "
        "done with the same traffic, in virtual time.",
        epilog="Where stdout is no terminal, the last line is JSON. Exit code 1: some step came "
        "out differently.",
    )
    parser.add_argument(
        "log", metavar="FILE", help="decision log, written by a server with --decision-log"
    )
    parser.add_argument("--policy", help="policy to simulate on the recorded traffic, as for serve")
    add_settings(
        parser, "change a scheduler or cache setting, or scheduler.options.NAME; repeatable"
    )
    add_card(parser)
    add_json(parser)
    args = parser.parse_args(argv)
    card = read_card(args)
    log = DecisionLog(args.log)
    if args.policy is None and not args.set and not card:
        exit_code, document = _check(log)
    else:
        exit_code, document = _compare(log, args.policy, args.set, card)
    if wants_json(args):
        print(json.dumps(document))
    return exit_code


def run_trace(argv: Sequence[str]) -> int:
    """`python -m aioserve trace FILE [-o OUT]`; returns the exit code. Raises `ConfigError`."""
    refuse_card(argv, "trace shows a log as it was written; `replay --card` simulates another one")
    parser = Parser(
        "trace",
        description="Turn a decision log into a trace for ui.perfetto.dev or chrome://tracing.",
    )
    parser.add_argument(
        "log", metavar="FILE", help="decision log, written by a server with --decision-log"
    )
    add_output(parser, "-o", "--output", help="file to write the trace to (default: FILE.json)")
    parser.add_argument(
        "--no-reasons",
        action="store_true",
        help="leave out why requests waited: faster, as the scheduler is not run again",
    )
    args = parser.parse_args(argv)
    log = DecisionLog(args.log)
    path = Path(args.output or f"{args.log}.json")
    try:
        with path.open("wb") as file:
            num_events = write_trace(log, file, with_reasons=not args.no_reasons)
    except OSError as error:
        raise ConfigError(f"cannot write trace {path}: {error.strerror}") from error
    print(f"{path}: {num_events} events; open it in https://ui.perfetto.dev")
    _say_if_cut(log)
    return 0


def _check(log: DecisionLog) -> tuple[int, dict[str, Any]]:
    """Return the exit code, and what was found as data."""
    result = replay(log)
    if result.divergence is not None:
        print(f"{result.policies}: today's code diverges {_where(result.divergence)}")
        for title, lines in (
            ("What differs", result.divergence.differences),
            ("Just before", result.divergence.state),
        ):
            print(f"{title}:")
            for line in lines:
                print(f"  {line}")
    else:
        counts = f"{result.num_steps} steps, {result.num_requests} requests"
        print(f"{result.policies}: {counts}, identical")
        _say_if_cut(log)
    document = {
        "identical": result.divergence is None,
        "steps": result.num_steps,
        "requests": result.num_requests,
        "complete": log.is_complete,
    }
    return (0 if result.divergence is None else 1), document


def _where(divergence: Divergence) -> str:
    kind = type(divergence.record).__name__
    if kind == "Planned":
        return f"in step {divergence.step_id}"
    return f"after step {divergence.step_id}, in a record {kind!r}"


def _say_if_cut(log: DecisionLog) -> None:
    if not log.is_complete:
        print("The log has no end: its server still runs, or died.")


def _compare(
    log: DecisionLog,
    policy: str | None,
    settings: list[tuple[str, str]],
    card: Sequence[tuple[str, Any]],
) -> tuple[int, dict[str, Any]]:
    """Print what the traffic measures under `policy` and `settings`, on the machine that the
    settings of a `card` name; exit code and JSON.
    """
    runner = EngineConfig.load(None, card).runner
    machine = step_times(runner) if card else None
    result = what_if(log, policy, settings, machine)
    name = policy or result.policies
    if settings:
        name += f" with {', '.join(f'{n}={v}' for n, v in settings)}"
    if machine is not None:
        name += f" on {machine.machine or runner.profile}"
    header = ("", "recorded", "simulated", "what if")
    print("{:22}{:>14}{:>14}{:>14}".format(*header))
    for measure, real in result.recorded.items():
        same = "-" if result.same is None else f"{result.same[measure]:.6g}"
        print(f"{_label(measure):22}{real:14.6g}{same:>14}{result.other[measure]:14.6g}")
    print(legend([_label(measure) for measure in result.recorded]))
    print(f"recorded, simulated: {result.policies}; what if: {name}")
    print(f"step times: {result.step_time.error}")
    if card:
        print(f"what if: {machine_in_words(runner)}")
    errors = _errors(result)
    if result.same is None:
        print(
            f"{result.policies} is the scheduler of another engine, which is not installed here: "
            "it is not simulated, and how far the simulation is from reality is not known"
        )
    if result.same is not None:
        print(f"On these requests, {name} against {result.policies}, both simulated: ", end="")
        print(f"{_listed(_ratios(result.other, result.same))}.")
    if errors:
        print(f"simulation against reality: {_listed(errors)}")
    if any(abs(error) > TRUSTED_ERROR for error in errors.values()):
        print(
            "The simulation is off by more than 15%: compare the simulated columns with each other "
            "only. Steps of equal size took very different times; was the machine shared?"
        )
    if result.num_refused:
        print(f"{result.num_refused} requests that were refused are left out of the simulations")
    _say_if_cut(log)
    return 0, _as_json(result, name)


def _label(measure: str) -> str:
    """Return the label of a row for people: JSON has it shorter."""
    return measure.replace("e2e", "end to end")


def _errors(result: WhatIf) -> dict[str, float]:
    """Return the errors of the simulation of what was recorded, relative to what was recorded."""
    return {} if result.same is None else _ratios(result.same, result.recorded)


def _ratios(values: Measures, others: Measures) -> dict[str, float]:
    """Return the changes of what is checked from `others` to `values`, as shares of `others`."""
    return {name: values[name] / others[name] - 1 for name in CHECKED if others[name]}


def _listed(changes: dict[str, float]) -> str:
    return ", ".join(f"{_label(measure)} {change:+.1%}" for measure, change in changes.items())


def _as_json(result: WhatIf, name: str) -> dict[str, Any]:
    return {
        "policies": {"recorded": result.policies, "what_if": name},
        "recorded": result.recorded,
        "simulated": result.same,
        "what_if": result.other,
        "errors": _errors(result),
        "step_time": msgspec.to_builtins(result.step_time),
        "refused_left_out": result.num_refused,
    }
