"""KV blocks that measured runs of vLLM had, beside those that the memory of the card holds here.

Ours are what a simulated engine on the card has unless `cache.num_kv_blocks` says otherwise. Reads
what the runs state; simulates nothing.
"""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from aioserve.errors import ConfigError
from aioserve.lab.cards.measured import EXTRA, databases
from aioserve.lab.reproduce.vllm.runs import BLOCK_TOKENS, MeasuredRun
from aioserve.lab.reproduce.vllm.simulators import RUNS, STAGES
from aioserve.lab.reproduce.vllm.stages import Experiment, card_options
from aioserve.runner.step_times import make_step_times

#: What the package calls the cards of the runs of `vllm-rtx`; it has no others of them.
CARDS = {"RTXPRO6000": "rtx_pro_6000_server"}
HEAD = ["runs", "model", "cards", "step, tokens", "vLLM", "here", "difference"]


class KvBlocks(msgspec.Struct, frozen=True):
    """The KV blocks, of 16 tokens, of runs with one model on as many cards."""

    data: str  # the set
    runs: tuple[str, ...]
    model: str
    num_cards: int
    step_tokens: int  # of the largest step
    reported: int | None  # None: the run does not say
    ours: int | None  # None: for the reason `why`
    why: str = ""

    @property
    def difference(self) -> float | None:
        """Ours against what the run had, as a share."""
        if self.reported is None or self.ours is None:
            return None
        return self.ours / self.reported - 1


def compare_blocks(
    experiments: Sequence[Experiment], runs: Sequence[MeasuredRun]
) -> list[KvBlocks]:
    """Return the blocks of all experiments and runs, those of experiments that differ in their load
    alone in one line. Raises `ConfigError` if the package is missing.
    """
    found: list[KvBlocks] = []
    with TemporaryDirectory() as scratch:
        for each in experiments:
            ours, why = _held(card_options(each, Path(scratch)), each.max_num_batched_tokens)
            line = KvBlocks(
                STAGES,
                (each.id,),
                each.model,
                each.tensor_parallel,
                each.max_num_batched_tokens,
                each.kv_blocks,
                ours,
                why,
            )
            same = [i for i, k in enumerate(found) if _alike(k) == _alike(line)]
            if same:
                [place] = same
                line = msgspec.structs.replace(line, runs=(*found[place].runs, each.id))
                found[place] = line
            else:
                found.append(line)
    return found + [_of_run(run) for run in runs]


def _alike(line: KvBlocks) -> KvBlocks:
    return msgspec.structs.replace(line, runs=())


def _of_run(run: MeasuredRun) -> KvBlocks:
    cards = int(run.engine.get("tensor_parallel_size", 1))
    step_tokens = int(run.engine["max_num_batched_tokens"])
    card = CARDS.get(run.machine)
    ours: int | None = None
    if run.blocks is None:
        why = "the run does not say how many it had"
    elif card is None:
        known = ", ".join(sorted(databases()))
        why = f"{EXTRA} has no tables of this card, but those of {known}"
    else:
        options = {"card": card, "model": run.model, "tp": cards}
        ours, why = _held(options, step_tokens)
    return KvBlocks(RUNS, (run.name,), run.model, cards, step_tokens, run.blocks, ours, why)


def _held(options: dict[str, Any], step_tokens: int) -> tuple[int | None, str]:
    """Return how many KV blocks a card holds beside steps of at most `step_tokens` tokens, and "";
    or None, and why this is not known.
    """
    try:
        tokens = make_step_times("card", options).num_kv_tokens(step_tokens, 1)
    except ConfigError as error:
        return None, str(error)
    return (None, "the package does not say") if tokens is None else (tokens // BLOCK_TOKENS, "")


def table_of_blocks(found: Sequence[KvBlocks]) -> list[list[str]]:
    """Return a line of heads and one for each model and engine, whose blocks are known."""
    rows = [HEAD]
    for line in found:
        if line.difference is not None:
            rows.append([*_cells(line), f"{100 * line.difference:+.1f}%"])
    return rows


def _cells(line: KvBlocks) -> list[str]:
    model = line.model.rpartition("/")[2]
    numbers = [f"{line.step_tokens:,}", f"{line.reported or 0:,}", f"{line.ours or 0:,}"]
    return [", ".join(line.runs), model, str(line.num_cards), *numbers]


def blocks_left_out(found: Sequence[KvBlocks]) -> list[str]:
    """Return a sentence for each run of which one of the numbers is not known, and why."""
    return [
        f"{', '.join(line.runs)}: "
        + (f"vLLM had {line.reported:,} blocks; " if line.reported else "")
        + f"{line.why}."
        for line in found
        if line.difference is None
    ]


def render_blocks(found: Sequence[KvBlocks]) -> str:
    """Return the table for a terminal, and what it leaves out."""
    rows = table_of_blocks(found)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    head = f"KV blocks of {BLOCK_TOKENS} tokens that vLLM reported, and those of the card here:"
    return "\n".join([head, *lines, *blocks_left_out(found)])


def blocks_csv(found: Sequence[KvBlocks]) -> str:
    """Return a line for each model and engine."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        ["set", "runs", "model", "cards", "step_tokens", "reported", "ours", "difference", "why"]
    )
    for line in found:
        difference = "" if line.difference is None else f"{line.difference:.4f}"
        writer.writerow(
            [
                line.data,
                " ".join(line.runs),
                line.model,
                line.num_cards,
                line.step_tokens,
                "" if line.reported is None else line.reported,
                "" if line.ours is None else line.ours,
                difference,
                line.why,
            ]
        )
    return out.getvalue()
