"""Finds out everything about a first CUDA card in less than ten minutes, stage after stage.

    python benchmarks/card.py run                              # all stages
    python benchmarks/card.py run --stages versions..graphs    # the first half, under 5 minutes
    python benchmarks/card.py run --resume                     # what has not ended yet
    python benchmarks/card.py run --rehearse                   # on stand-ins for the card, no card
    python benchmarks/card.py report                           # the table of what has been found

Each stage is a process with a limit of time. It writes a line of JSON into a file before and after
each of its parts, so what was found before an interruption is kept. A part that raises, computes
wrong numbers, hangs or kills its process is named; the other parts and stages go on. What the
stages do is in card_stages.py. docs/gpu.md says how to use this.
"""

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NamedTuple

from harness import ROOT, Args, Opt, Program

program = Program(__doc__)

REAL_CARD = "card_stages:Card"
STAND_IN = "tests.runner.cuda.card_stand_ins:StandIn"
FOLDER = ROOT / "build" / "card"
RESULTS = "results.jsonl"
POLL_SECONDS = 0.1
START_SECONDS = 60.0  # in which torch and transformers are imported, once
LAST_WORDS_SECONDS = 1.0  # in which a process that is stopped says where it stands


class Stage(NamedTuple):
    """The limits of a stage, in seconds; its function in `card_stages` has the same name."""

    limit: float  # of all its processes together
    part_limit: float  # of one of its parts, the start of a process included
    question: str


#: In order of how likely they fail. The first five together, and the others, take under 4 minutes,
#: and at most `START_SECONDS` more for imports.
STAGES = {
    "versions": Stage(30, 30, "Can everything be imported, and is there a card?"),
    "kernels": Stage(60, 60, "Does flashinfer load, or compile, the kernels of each kind?"),
    "attention": Stage(70, 25, "Does each kind of attention give the numbers of plain torch?"),
    "graphs": Stage(40, 25, "Do CUDA graphs hold far from the lengths of their capture?"),
    "sampler": Stage(30, 25, "Does the card draw the tokens that the CPU draws?"),
    "overlap": Stage(55, 40, "Do 100 overlapped requests with preemption get the right tokens?"),
    "models": Stage(
        45, 20, "Do models with windows, experts, drafts, grammars and images compute right?"
    ),
    "speed": Stage(110, 80, "Which share of the theoretical limit is reached?"),
    "host": Stage(25, 20, "How long does the host work on a step, and does it ever wait?"),
}


class Where(NamedTuple):
    """What the process of a stage is told."""

    folder: Path
    card: str  # module:class of the card, which is the real one or a stand-in
    stage: str
    skip: frozenset[str]  # parts that were tried before


# Running stages.


def run_stages(names: Sequence[str], folder: Path, card: str, patience: float = 1.0) -> None:
    """Run stages, each within `patience` times its limit, adding to the results in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    # What takes seconds to import is imported once. A process that is forked later finds it by the
    # same paths, and the module of this program is not on them by itself.
    paths = [str(ROOT / "benchmarks"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    context.set_forkserver_preload(["card_stages"])
    first = context.Process(target=_nothing)
    first.start()
    first.join(START_SECONDS)
    for name in names:
        began = time.monotonic()
        print(f"{name}: {STAGES[name].question}", flush=True)
        ends = _run_stage(context, name, folder, card, patience)
        _write(folder, stage=name, end=ends, seconds=round(time.monotonic() - began, 1))


def _run_stage(context: Any, name: str, folder: Path, card: str, patience: float) -> str:
    """Run a stage in as many processes as it takes to try all of its parts; returns "", or why not
    all of it was tried.
    """
    stage = STAGES[name]
    deadline = time.monotonic() + stage.limit * patience
    skip: set[str] = set()
    while True:
        before, log = len(_lines(folder)), folder / f"{name}.log"
        log_size = log.stat().st_size if log.exists() else 0
        where = Where(folder, card, name, frozenset(skip))
        process = context.Process(target=_stage_process, args=(where,))
        try:
            process.start()
        except (OSError, EOFError) as error:
            return f"no process could be started ({type(error).__name__})"
        why = _watch(process, folder, before, deadline, stage.part_limit * patience)
        if not why:
            return ""
        why += _last_words(log, log_size)
        new = _lines(folder)[before:]
        started = {line["begin"]: line["is_setup"] for line in new if "begin" in line}
        if not started:
            return f"the process {why}, before the first of its parts"
        last = list(started)[-1]
        if not any(line.get("part") == last for line in new):
            _write(folder, stage=name, part=last, error=f"the process {why}")
        if started[last]:
            return f"no other part was tried, as all need {last!r}"
        if time.monotonic() >= deadline:
            return (
                f"the stage has {stage.limit * patience:.0f} s; what follows {last!r} was not tried"
            )
        skip |= {part for part, is_setup in started.items() if not is_setup}


def _watch(
    process: ForkServerProcess, folder: Path, before: int, deadline: float, part_limit: float
) -> str:
    """Wait for the process, and stop it when it or one of its parts takes too long. Returns how it
    died; "" if it has tried all.
    """
    seen, part_began = before, time.monotonic()
    while True:
        process.join(POLL_SECONDS)
        if process.exitcode is not None:
            break
        if (count := len(_lines(folder))) > seen:
            seen, part_began = count, time.monotonic()
        now = time.monotonic()
        if now - part_began > part_limit or now > deadline:
            _stop(process)
            spent = now - part_began
            if spent > part_limit:
                return f"hung and was stopped after {spent:.0f} s"
            return f"was stopped after {spent:.0f} s at the end of the stage's time"
    if process.exitcode < 0:
        return f"died of {signal.Signals(-process.exitcode).name}"
    return f"ended with exit code {process.exitcode}" if process.exitcode else ""


def _stop(process: ForkServerProcess) -> None:
    """End a process and what it has started, after it has written where it stands."""
    assert process.pid is not None
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGUSR1)
        process.join(LAST_WORDS_SECONDS)
        os.killpg(process.pid, signal.SIGKILL)
    process.join(LAST_WORDS_SECONDS)  # one that is stuck in the driver is left alone


def _nothing() -> None:
    """Show that a process can be forked, which waits until torch is imported."""


def _stage_process(where: Where) -> None:
    """Be the process of a stage."""
    import faulthandler

    os.setsid()  # what it starts is stopped with it
    log = (where.folder / f"{where.stage}.log").open("a", encoding="utf-8")
    for number in (1, 2):
        os.dup2(log.fileno(), number)
    faulthandler.enable(log)
    faulthandler.register(signal.SIGUSR1, log, all_threads=True)
    import card_stages

    card_stages.run_parts(
        where.card, where.stage, where.skip, lambda **line: _write(where.folder, **line)
    )


def _last_words(log: Path, begin: int) -> str:
    """Return where the thread that died or was stopped stood, or else the last line of its log."""
    text = log.read_text(encoding="utf-8", errors="replace")[begin:] if log.exists() else ""
    dumped = text.rpartition("Current thread ")[2].partition("\n\n")[0]
    if dumped != text:
        frames = [line.strip().replace('"', "") for line in dumped.splitlines() if "File" in line]
        own = [frame for frame in frames if str(ROOT) in frame]
        places = dict.fromkeys([*frames[:1], *own[:1]])
        return "; it stood at " + ", called by ".join(places).replace(f"{ROOT}/", "")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"; its log ends with {lines[-1][:200]!r}" if lines else ""


# The file of results.


def _write(folder: Path, **line: Any) -> None:
    """Add a line to the results, at once and whole."""
    data = json.dumps({"time": round(time.time(), 2), **line}, default=str) + "\n"
    with (folder / RESULTS).open("a", encoding="utf-8") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _lines(folder: Path) -> list[dict[str, Any]]:
    """Return the lines that were written whole."""
    path = folder / RESULTS
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


# What was found, in words.


class Found(NamedTuple):
    """The last run of a stage, as its lines in the results say."""

    stage: str
    result: str  # passed, failed, not run, interrupted
    seconds: float
    parts: dict[str, dict[str, Any]]  # the last line of each part
    why: list[str]  # it did not pass


def read_results(folder: Path) -> list[Found]:
    """Return what is known of each stage, in their order."""
    lines = _lines(folder)
    return [_found(name, [line for line in lines if line["stage"] == name]) for name in STAGES]


def _found(name: str, lines: list[dict[str, Any]]) -> Found:
    parts: dict[str, dict[str, Any]] = {}
    for line in lines:
        if "begin" in line:
            parts[line["begin"]] = line
        elif "part" in line:
            parts[line["part"]] = line
    ends = [line for line in lines if "end" in line]
    if not lines:
        return Found(name, "not run", 0.0, {}, [])
    open_parts = [part for part, line in parts.items() if "begin" in line]
    failed = {part: line["error"] for part, line in parts.items() if "error" in line}
    why = [f"{part}: {error}" for part, error in failed.items()]
    if not ends:
        why.append(f"it was interrupted in {', '.join(open_parts) or 'its start'}")
        return Found(name, "interrupted", 0.0, parts, why)
    if ends[-1]["end"]:
        why.append(ends[-1]["end"])
    result = "failed" if why else "passed"
    return Found(name, result, ends[-1]["seconds"], parts, why)


def table(found: Iterable[Found]) -> str:
    """Return a row for each stage: how it ended, and why it failed."""
    rows = []
    for each in found:
        tried = len(each.parts)
        good = sum("error" not in line and "begin" not in line for line in each.parts.values())
        parts = f"{good} of {tried}" if tried else ""
        rows.append(f"{each.stage:10} {each.result:12} {parts:>9} {each.seconds:7.1f} s")
        rows += [f"    {reason}" for reason in each.why]
    head = f"{'stage':10} {'result':12} {'parts':>9} {'time':>9}"
    return "\n".join([head, *rows])


def markdown(found: Sequence[Found]) -> str:
    """Return the block for docs/gpu.md: card, date, versions, stages, and the numbers of parts."""
    facts: dict[str, Any] = {}
    for line in found[0].parts.values():
        facts |= line.get("found", {})
    found = [each for each in found if each.result != "not run"]
    told = [facts.pop("card", "no card"), time.strftime("%Y-%m-%d")]
    told += [f"{name} {value}" for name, value in facts.items()]
    rows = [
        f"Card, date, versions: {', '.join(told)}",
        "",
        "| stage | result | parts | what was wrong |",
        "|---|---|---|---|",
    ]
    for each in found:
        good = sum("error" not in line and "begin" not in line for line in each.parts.values())
        why = "; ".join(each.why).replace("|", "/")
        rows.append(f"| {each.stage} | {each.result} | {good} of {len(each.parts)} | {why} |")
    rows += ["", "| stage | part | found |", "|---|---|---|"]
    for each in found:
        for part, line in each.parts.items():
            numbers = [f"{name} {_number(value)}" for name, value in line.get("found", {}).items()]
            if numbers and each.stage != "versions":
                rows.append(f"| {each.stage} | {part} | {', '.join(numbers)} |")
    return "\n".join(rows)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# The command line.


def chosen(words: str) -> list[str]:
    """Return the stages of `a..b`, or of `a,b`. Raises `ValueError` for an unknown one."""
    names = list(STAGES)
    first, dots, last = words.partition("..")
    asked = [first or names[0], last or names[-1]] if dots else words.split(",")
    for name in asked:
        if name not in STAGES:
            raise ValueError(f"there is no stage {name!r}: the stages are {', '.join(names)}")
    if dots:
        return names[names.index(asked[0]) : names.index(asked[1]) + 1]
    return asked


@program.command(
    "run",
    stages=Opt("..", "stages as a..b or a,b"),
    resume=Opt(False, "keep the results of stages that have ended, and run the others"),
    folder=Opt(str(FOLDER), "where results and logs are written"),
    patience=Opt(1.0, "factor of all limits of time: 20 where kernels have to be compiled"),
    rehearse=Opt(False, "on stand-ins for the card"),
    card=Opt(REAL_CARD, "module:class of the card or of a stand-in"),
)
def run(args: Args) -> tuple[None, int]:
    """Run stages, then print the table and the block for docs/gpu.md."""
    folder = Path(args.folder)
    try:
        names = chosen(args.stages)
    except ValueError as error:
        sys.exit(str(error))
    if args.resume:
        done = {line["stage"] for line in _lines(folder) if "end" in line}
        names = [name for name in names if name not in done]
    else:
        for name in (RESULTS, *(f"{stage}.log" for stage in STAGES)):
            (folder / name).unlink(missing_ok=True)
    run_stages(names, folder, STAND_IN if args.rehearse else args.card, args.patience)
    return _report(folder)


@program.command("report", folder=Opt(str(FOLDER), "where the results are"))
def report(args: Args) -> tuple[None, int]:
    """Print the table and the block for docs/gpu.md of results that are there."""
    return _report(Path(args.folder))


def _report(folder: Path) -> tuple[None, int]:
    found = read_results(folder)
    print(f"\n{table(found)}\n\n{markdown(found)}")
    return None, int(any(each.result in ("failed", "interrupted") for each in found))


if __name__ == "__main__":
    program.main()
