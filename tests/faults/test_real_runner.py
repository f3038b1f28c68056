"""The same around the runner that computes: tokens are those of a model, and a step that raises is
computed again without the request that makes it raise.
"""

import asyncio
import os
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import aioserve
from aioserve import EngineConfig
from aioserve.config import (
    AdapterConfig,
    CacheConfig,
    ModelConfig,
    RunnerConfig,
    SchedulerConfig,
    ServerConfig,
)
from aioserve.testing.faults import RUNNER_KINDS, Fault, Faults
from tests.adapters import make_adapter
from tests.faults.rig import LENGTHS, Parts, Reference, Rig, reference_of
from tests.kit import executor_of, runner_of

IS_LONG = "AIOSERVE_FAULT_DAYS" in os.environ
EMBEDDED = Path(aioserve.__file__).parent / "model_source" / "embedded"
ASKS: tuple[dict[str, Any], ...] = (
    {"prompt": "Once upon a time", "ignore_eos": True},
    {"prompt": "Once upon a time there was a king", "ignore_eos": True, "logprobs": 2},
    {"prompt": "x" * 150, "ignore_eos": True},
    {"prompt": "A:", "structured_outputs": {"regex": "[a-c]{60}"}},
    {"prompt": "Once upon a time", "model": "adapted"},
)
PARTS: Parts = {
    "forward": (lambda engine: executor_of(engine)._model, "forward"),
    "logits": (lambda engine: executor_of(engine)._model, "forward"),
    "sampler": (executor_of, "choose"),
    "batch": (lambda engine: executor_of(engine)._batch, "apply"),
    "kept": (lambda engine: executor_of(engine)._batch, "append"),
    "grammar": (lambda engine: runner_of(engine).grammars, "check"),
    "matcher": (lambda engine: runner_of(engine).grammars, "matcher"),
    "adapter": (lambda engine: engine.adapters, "hold"),
}
RAISING = ("raises", "no memory")


class Known(NamedTuple):
    """The settings, and what every body is answered."""

    config: EngineConfig
    reference: Reference


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Known:
    adapter = make_adapter(EMBEDDED, tmp_path_factory.mktemp("adapter"))
    config = EngineConfig(
        model=ModelConfig(dtype="float32"),
        cache=CacheConfig(num_kv_blocks=128, block_size=8),
        scheduler=SchedulerConfig(
            policy="chunked_prefill",
            options={"chunk_size": 32},
            max_num_seqs=6,
            request_log=os.devnull,
        ),
        adapters=AdapterConfig(lora=(f"adapted={adapter}",)),
        runner=RunnerConfig(threads=1),
        server=ServerConfig(exit_on_dead_engine=False),
    )
    return Known(config, asyncio.run(reference_of(config, ASKS)))


async def meet(fault: Fault, known: Known, injected: Counter[str]) -> bool:
    """One fault among a crowd; whether it came."""
    faults = Faults()
    async with Rig(known.config, faults, known.reference, [], ASKS, PARTS) as rig:
        faults.arm(fault)
        for ask in range(len(ASKS)):
            rig.come(("streams", "whole")[ask % 2], ask, LENGTHS[ask % len(LENGTHS)])
        await rig.settle()
    injected.update(faults.injected)
    return bool(faults.came)


@pytest.mark.parametrize("after", (0, 1, 4, 7) if IS_LONG else (1,))
@pytest.mark.parametrize(
    ("part", "kinds"),
    [
        ("runner", RUNNER_KINDS),
        ("forward", RAISING),
        ("sampler", RAISING),
        ("kept", RAISING),
        ("batch", RAISING),
        ("logits", ("nonsense",)),
        ("grammar", (*RAISING, "cancelled")),
        ("matcher", RAISING),
        ("adapter", (*RAISING, "cancelled")),
    ],
)
def test_a_part_of_the_runner_that_fails_leaves_nothing(
    part: str, kinds: tuple[str, ...], after: int, known: Known, injected: Counter[str]
) -> None:
    for kind in kinds:
        asyncio.run(meet(Fault(part, kind, 0 if part in RARE else after), known, injected))


#: Asked once by a request that wants it.
RARE = ("grammar", "matcher", "adapter")
