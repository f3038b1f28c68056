"""Stand-ins for the card that `benchmarks/card.py` examines: a sound one, and some with a fault.

Each is made in the process of a stage, where flashinfer's stand-in takes the place of the module.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

import card_stages
import torch
from gpu import REHEARSAL
from torch import Tensor

from aioserve.config import EngineConfig
from aioserve.gpu.cuda import flashinfer_attention
from aioserve.gpu.cuda.runner import OverlappedRunner
from aioserve.gpu.cuda.sampler import DrawColumns, draw
from tests.runner.cuda import fake_flashinfer
from tests.runner.cuda.fake_device import FakeDevice
from tests.runner.cuda.fake_flashinfer import FakeFlashInfer
from tests.runner.cuda.on_device import make_device_runner

SMALL = card_stages.Amounts(
    lengths=(1, 16, 40, 130),
    prompts=(19, 2),
    sizes=(4, 1),
    draws=400,
    vocab_size=500,
    requests=10,
    longest_prompt=40,
    output_tokens=8,
    blocks=14,
    seats=8,
    speed=REHEARSAL._replace(steps=6, context=20, prefill=60),
    shape="2m",
    host_steps=12,
)


class StandIn(card_stages.Card):
    """A device that computes late, on one thread of the CPU, and flashinfer in plain torch."""

    amounts = SMALL

    def __init__(self) -> None:
        torch.set_num_threads(1)
        flashinfer_attention.WORKSPACE_BYTES = 1 << 10  # which nothing here uses
        self.fake = FakeFlashInfer(self.device, None)
        self.module = sys.modules["flashinfer"] = self.fake.module()
        self.module.__version__ = "0 (a stand-in)"

    @cached_property
    def device(self) -> FakeDevice:
        return FakeDevice(eagerness=0.1)

    def driver(self) -> str:
        return "none: it is a stand-in"

    def runner(self, config: EngineConfig) -> OverlappedRunner:
        return make_device_runner(config, self.device)

    def forbid_waiting(self, launches: Callable[[], object]) -> None:
        launches()


class WithoutTriton(StandIn):
    """A stand-in for a machine on which Triton cannot be imported."""

    def __init__(self) -> None:
        super().__init__()
        sys.modules["triton"] = None  # type: ignore[assignment]


class WithoutCompiler(StandIn):
    """The kernels of windows in decodes are neither there nor can be compiled."""

    def __init__(self) -> None:
        super().__init__()
        for wrapper in (fake_flashinfer._Decode, fake_flashinfer._Prefill):
            wrapper.plan = _refusing_windows(wrapper.plan)  # type: ignore[method-assign]


def _refusing_windows(plan: Callable[..., None]) -> Callable[..., None]:
    def refuse(self: Any, *args: Any, window_left: int = -1, **settings: Any) -> None:
        if window_left >= 0:
            raise RuntimeError("Could not find nvcc and default cuda_home does not exist\n...")
        plan(self, *args, window_left=window_left, **settings)

    return refuse


class WrongKernel(StandIn):
    """Decodes with heads of 64 miss the newest token."""

    def __init__(self) -> None:
        super().__init__()
        run = fake_flashinfer._Decode.run

        def wrong(self: Any, q: Tensor, cache: Any, *, out: Tensor) -> Tensor:
            if q.shape[2] == 64:
                lengths = self._state["last_page_len"]
                self._state["last_page_len"] = (lengths - 1).clamp(min=1)
            return run(self, q, cache, out=out)

        fake_flashinfer._Decode.run = wrong  # type: ignore[method-assign]


class SilentKernel(StandIn):
    """Decodes of 28 heads write nothing."""

    def __init__(self) -> None:
        super().__init__()
        run = fake_flashinfer._Decode.run

        def silent(self: Any, q: Tensor, cache: Any, *, out: Tensor) -> Tensor:
            return out if q.shape[1] == 28 else run(self, q, cache, out=out)

        fake_flashinfer._Decode.run = silent  # type: ignore[method-assign]


class WithoutSinks(StandIn):
    """Sinks take no share of what a head finds."""

    def __init__(self) -> None:
        super().__init__()
        run = fake_flashinfer._Prefill.run

        def without(self: Any, q: Tensor, cache: Any, *more: Any, out: Tensor) -> Tensor:
            if more:
                more = (torch.full_like(more[0], -torch.inf), more[1])
            return run(self, q, cache, *more, out=out)

        fake_flashinfer._Prefill.run = without  # type: ignore[method-assign]


class UnturnedLatents(StandIn):
    """Latent attention leaves out what keys have besides the latent states."""

    def __init__(self) -> None:
        super().__init__()
        run = fake_flashinfer._Latents.run

        def without(self: Any, *, query: Tensor, **settings: Any) -> Tensor:
            query = query.clone()
            query[..., self._state["sizes"][1] :] = 0
            return run(self, query=query, **settings)

        fake_flashinfer._Latents.run = without  # type: ignore[method-assign]


class WrongScale(StandIn):
    """Heads that are stored wider than they are get the scale of their wider size."""

    def __init__(self) -> None:
        super().__init__()
        settings = flashinfer_attention._settings

        def wide(kind: Any, dtypes: Any) -> dict[str, Any]:
            return settings(kind, dtypes) | {"sm_scale": kind.head_dim**-0.5}

        flashinfer_attention._settings = wide


class StalePlan(StandIn):
    """Wrappers of CUDA graphs keep the plan that they were captured with."""

    def __init__(self) -> None:
        super().__init__()
        wrappers = fake_flashinfer._Decode, fake_flashinfer._Prefill, fake_flashinfer._Latents
        for wrapper in wrappers:
            wrapper.plan = _planned_once(wrapper.plan)  # type: ignore[attr-defined]


def _planned_once(plan: Callable[..., None]) -> Callable[..., None]:
    def once(self: Any, *args: Any, **settings: Any) -> None:
        if not (self._fixed_size and self._state):
            plan(self, *args, **settings)

    return once


def _drawing(choose: Callable[[Tensor, DrawColumns], Tensor]) -> None:
    card_stages.choose_draw = lambda device: choose  # type: ignore[assignment]


class WithoutTopP(StandIn):
    """A stand-in whose sampler ignores top-p."""

    def __init__(self) -> None:
        super().__init__()

        def without(logits: Tensor, columns: DrawColumns) -> Tensor:
            return draw(logits, columns._replace(top_p=torch.ones_like(columns.top_p)))

        _drawing(without)


class CrashingDraw(StandIn):
    """Draws with top-k kill the process."""

    def __init__(self) -> None:
        super().__init__()

        def crash(logits: Tensor, columns: DrawColumns) -> Tensor:
            if columns.has_top_k:
                os.kill(os.getpid(), signal.SIGSEGV)
            return draw(logits, columns)

        _drawing(crash)


class HangingDraw(StandIn):
    """Draws with min-p never end."""

    def __init__(self) -> None:
        super().__init__()

        def hang(logits: Tensor, columns: DrawColumns) -> Tensor:
            while columns.min_p_floor.isfinite().any():
                time.sleep(1)
            return draw(logits, columns)

        _drawing(hang)


class UnguardedPlan(StandIn):
    """The host does not wait until the last plan has been copied out of its pinned buffer."""

    def __init__(self) -> None:
        super().__init__()
        begin = flashinfer_attention.FlashInferAttention.begin

        def unguarded(self: Any, *args: Any) -> Any:
            self._guard = None
            return begin(self, *args)

        flashinfer_attention.FlashInferAttention.begin = unguarded  # type: ignore[method-assign]


class RacingPlan(UnguardedPlan):
    """An unguarded plan on a device that, as a card, does not notice: a replayed step runs with
    what lies in the pinned buffer of its wrapper when the copy from it gets there.
    """

    @cached_property
    def device(self) -> FakeDevice:
        # It begins a step when the next one has been planned, so that no luck is needed.
        return FakeDevice(eagerness=0, slowness=0.2)

    def __init__(self) -> None:
        super().__init__()
        guarded = fake_flashinfer._Wrapper._plan

        def racing(
            self: Any, host: dict[str, Tensor], indices: Tensor, page_size: int, **settings: Any
        ) -> None:
            if not getattr(self, "_fixed_size", 0):
                guarded(self, host, indices, page_size, **settings)
                return
            self._module.num_plans += 1
            numbers = {name: tensor.clone() for name, tensor in host.items()}
            # In one assignment: the device's thread may read it for the plan before this one.
            self._late = {**numbers, "page_size": page_size, **settings}
            begin = indices.storage_offset()
            size = indices.untyped_storage().nbytes() // indices.element_size() - begin
            pages = torch.as_strided(indices, (size,), (1,), begin)  # all that a graph may read

            def arrive() -> None:
                self._state = {**self._late, "indices": pages.clone()}

            self._module.device.put(arrive)

        fake_flashinfer._Wrapper._plan = racing  # type: ignore[method-assign]


class WrongPages(StandIn):
    """Decodes from CUDA graphs read the first page of a request in place of its last one."""

    def __init__(self) -> None:
        super().__init__()
        plan = fake_flashinfer._Decode.plan

        def wrong(self: Any, indptr: Tensor, indices: Tensor, *args: Any, **settings: Any) -> None:
            if self._fixed_size and indptr[1] > 1:
                indices = indices.clone()
                indices[indptr[1] - 1] = indices[0]
            plan(self, indptr, indices, *args, **settings)

        fake_flashinfer._Decode.plan = wrong  # type: ignore[method-assign]


class LittleMemory(StandIn):
    """A step of four decodes does not fit into memory."""

    def __init__(self) -> None:
        super().__init__()
        attend = fake_flashinfer._Decode.run

        def refuse(self: Any, q: Tensor, cache: Any, *, out: Tensor) -> Tensor:
            if len(q) == 4 and self._state["kv_indptr"][-1] > 4:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return attend(self, q, cache, out=out)

        fake_flashinfer._Decode.run = refuse  # type: ignore[method-assign]


class RefusingDevice(FakeDevice):
    """A device that captures no CUDA graphs."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        super().capture(work)
        raise RuntimeError("operation not permitted when stream is capturing")


class WithoutGraphs(StandIn):
    """No CUDA graph can be captured, and the server would go on, slower."""

    @cached_property
    def device(self) -> FakeDevice:
        return RefusingDevice(eagerness=0.1)


class EndlessWindows(StandIn):
    """Layers with a window see everything."""

    def __init__(self) -> None:
        super().__init__()
        plan = fake_flashinfer._Wrapper._plan

        def endless(self: Any, *args: Any, **settings: Any) -> None:
            plan(self, *args, **(settings | {"window_left": -1}))

        fake_flashinfer._Wrapper._plan = endless  # type: ignore[method-assign]


class WaitingLaunch(StandIn):
    """A launch waits for the card."""

    def forbid_waiting(self, launches: Callable[[], object]) -> None:
        raise RuntimeError("called a synchronizing CUDA operation")
