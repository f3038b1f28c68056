"""Settings of the runner: the device, its memory, and its threads."""

from typing import Annotated, Literal

from aioserve.config.section import PositiveInt, doc
from aioserve.config.simulation import SimulatorConfig


class RunnerConfig(SimulatorConfig, frozen=True, kw_only=True):
    """The runner: where steps are computed, or that they are simulated."""

    runner: Annotated[
        Literal["model", "simulated"],
        doc("runner; model: compute; simulated: made-up tokens after a modelled step time"),
    ] = "model"
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        doc("device of the model; auto: a CUDA device if there is one, else the CPU"),
    ] = "auto"
    gpu_memory_utilization: Annotated[
        float, doc("share of a CUDA device's memory that may be used", gt=0, le=1)
    ] = 0.9
    enforce_eager: Annotated[
        bool, doc("use no CUDA graphs: less memory, a faster start, slower decoding")
    ] = False
    threads: Annotated[
        PositiveInt | None,
        doc(
            "fixed number of compute threads (default: one per physical core, and fewer while "
            "other processes want the cores)"
        ),
    ] = None
    tensor_parallel_size: Annotated[
        PositiveInt,
        doc("tensor parallelism: processes that share the model, its KV cache and its threads"),
    ] = 1
    rank_timeout: Annotated[
        float,
        doc(
            "tensor parallelism: seconds for which one process may keep the others waiting, at the "
            "start or in a step, before the engine ends",
            gt=0,
            le=86400,
        ),
    ] = 300.0
    seed: Annotated[
        int, doc("seed of simulated tokens and of requests that have no seed", ge=0)
    ] = 0
