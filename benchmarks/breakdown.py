"""Where the time of a step goes: cProfile on the runner's calls, grouped by what they are for.

A call of C code belongs to the Python function it is made from, unless its name says what it is.
Names of modules and kernels that do not exist match nothing. The profiler makes Python slower
than it is; the sum beside the step's own time says by how much.
"""

import cProfile
import pstats
import re
from collections import defaultdict
from functools import partial

from steps import Case, StepBench

from aioserve.runner.cpu.fused import WholeDecoder
from aioserve.runner.fused.decoder import FusedDecoder

Function = tuple[str, int, str]  # file ("~" for C code), line, name

# The first that matches file:name of a function, or of the nearest caller of C code, decides.
RULES = [
    ("linear", r"~:.*(linear|addmm|\bmm\b)|cpu/(linear|panels)\.py|kernels/__init__\.py:linear"),
    ("attention", r"kernels/__init__\.py:(paged_attention|store_kv)"),
    ("attention", r"attention(/\w+)?\.py:(?!prepare)"),
    ("attention", r"~:.*scaled_dot_product"),
    ("sampling", r"runner/(cpu/sampler|logits_edits|noise|sampling_columns)\.py"),
    ("input preparation", r"input_batch\.py|attention\.py:prepare|ops\.py:begin"),
    (
        "norm, rotary, activation",
        r"kernels/__init__\.py:(rms_norm|add_rms_norm|rope_store|\w+_and_mul)|fused(/\w+)?\.py"
        r"|transformers/.*\.py|~:.*(silu|gelu|embedding)",
    ),
]
PYTHON = "Python"
# Own time of these Python functions is that of the kernels they call through ctypes.
CTYPES = re.compile(r"kernels/__init__\.py")


def break_down(bench: StepBench, case: Case, chunk: int, num_steps: int = 10) -> dict[str, float]:
    """Seconds of one step by purpose, profiler included.

    A forward pass that is one call into C is taken apart: its operations run one by one.
    """
    decoder = getattr(bench.runner._model, "decoder", None)
    if isinstance(decoder, WholeDecoder):
        vars(decoder)["forward"] = partial(FusedDecoder.forward, decoder)
    steps = bench.begin(case, chunk)
    steps.step()
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(num_steps):
        steps.step()
    profiler.disable()
    steps.end()
    if isinstance(decoder, WholeDecoder):
        del vars(decoder)["forward"]
    totals: dict[str, float] = defaultdict(float)
    stats = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    for function, (_, _, own, _, callers) in stats.items():
        if not _is_c(function):
            totals[PYTHON if not CTYPES.search(function[0]) else _purpose(function)] += own
        elif (purpose := _named(function)) is not None:
            totals[purpose] += own
        else:
            for caller, (_, _, share, _) in callers.items():
                totals[_purpose_of_caller(caller, stats)] += share
    return {purpose: seconds / num_steps for purpose, seconds in totals.items()}


def _is_c(function: Function) -> bool:
    return function[0] == "~"


def _named(function: Function) -> str | None:
    text = f"{function[0]}:{function[2]}"
    return next((purpose for purpose, pattern in RULES if re.search(pattern, text)), None)


def _purpose(function: Function) -> str:
    return _named(function) or PYTHON


def _purpose_of_caller(function: Function, stats: dict[Function, tuple], depth: int = 4) -> str:  # type: ignore[type-arg]
    """Of the nearest function up the calls that has one; of several callers the costliest."""
    for _ in range(depth):
        if (purpose := _named(function)) is not None:
            return purpose
        callers = stats[function][4] if function in stats else {}
        if not callers:
            break
        function = max(callers, key=lambda caller: callers[caller][3])
    return PYTHON
