"""What the runners of several ranks share: they watch the others, and end when one of them does.

Knows processes and an event loop; knows nothing about what ranks compute. Free of torch.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError, RunnerDeadError
from aioserve.gpu.tensor_parallel.processes import OtherRanks, in_a_line
from aioserve.runner.interface import RunnerInfo, RunnerInterface

if TYPE_CHECKING:
    import torch

    from aioserve.gpu.tensor_parallel.group import GroupedRanks


class FirstRankRunner(RunnerInterface):
    """A runner that other ranks follow: to be derived from before the runner of one process that
    does the steps.
    """

    _config: EngineConfig
    _rank_module: str  # whose `load_share` the other processes call
    _other_ranks: OtherRanks | None = None
    _ranks: "GroupedRanks | None" = None
    _death: RunnerDeadError | None = None
    _on_death: Callable[[], None] | None = None

    async def load(self) -> RunnerInfo:
        loop = asyncio.get_running_loop()

        def on_end(error: RunnerDeadError) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: no task is left to hear
                loop.call_soon_threadsafe(self._die, error)

        # Before this process imports what takes seconds: they import the same beside it.
        self._other_ranks = OtherRanks(self._rank_module, self._config, on_end)
        return await super().load()  # type: ignore[safe-super]  # of the runner named next

    def _die(self, error: RunnerDeadError) -> None:
        self._death = error
        if self._ranks is not None:
            self._ranks.leave()  # else a card waits for the rank that has gone
        if self._on_death is not None:
            self._on_death()

    def check(self) -> None:
        if self._death is not None:
            raise self._death

    def watch(self, on_death: Callable[[], None]) -> None:
        self._on_death = on_death

    async def close(self) -> None:
        try:
            await super().close()  # type: ignore[safe-super]  # of that runner
        finally:
            if self._other_ranks is not None:
                await asyncio.to_thread(self._other_ranks.close)

    # On the thread that computes.

    @property
    def _others(self) -> OtherRanks:
        assert self._other_ranks is not None, "load() first"
        return self._other_ranks

    @property
    def _met(self) -> "GroupedRanks":
        assert self._ranks is not None, "load() first"
        return self._ranks

    @contextlib.contextmanager
    def _loading(self, device: "torch.device | None" = None) -> "Iterator[GroupedRanks]":
        """Meets the other ranks, which load beside the block, and waits for them at its end."""
        from aioserve.gpu.tensor_parallel.group import GroupedRanks

        settings, others = self._config.runner, self._others
        try:
            others.wait_here()
            size, timeout = settings.tensor_parallel_size, settings.rank_timeout
            self._ranks = GroupedRanks(0, size, others.meeting, timeout, device)
            yield self._ranks
            others.wait_loaded()
        except Exception as error:
            why = others.why(error)
            if isinstance(why, RunnerDeadError):  # nothing runs yet that could die of it
                raise ConfigError(in_a_line(why)) from error
            raise

    def _end_of(self, error: Exception) -> RunnerDeadError:
        """Return what it means that here a step fails, or what else the others were told to do."""
        why = self._others.why(error)
        if isinstance(why, RunnerDeadError):
            return why
        if isinstance(error, RunnerDeadError):
            return error
        reason = f"the ranks may no longer agree, as one has failed: {in_a_line(error)}"
        return RunnerDeadError(reason)
