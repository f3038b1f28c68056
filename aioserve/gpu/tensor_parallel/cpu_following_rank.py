"""A rank beside the first on a CPU: does what that one says with its share of the model.

Steps, adapters, and what becomes of its memory. It samples nothing. Knows messages and
`ResidentModel`.
"""

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from aioserve.config import EngineConfig
from aioserve.errors import ConfigError, RequestFailedError
from aioserve.features.kv_connector.host_blocks import SharedSlots
from aioserve.features.lora.peft_directory import read_adapter
from aioserve.gpu.tensor_parallel.group import SharedError
from aioserve.gpu.tensor_parallel.processes import (
    DropAdapter,
    FirstRank,
    Free,
    Load,
    MakeHostBlocks,
    Message,
    ReadAdapter,
    Sampled,
    Start,
    Step,
    UseAdapter,
    decode,
)
from aioserve.gpu.tensor_parallel.rank_process import meet
from aioserve.model_source.info import ModelInfo, read_same_model
from aioserve.runner.cpu.executor import ResidentModel, StepExecutor
from aioserve.runner.cpu.load import load_on_cpu
from aioserve.runner.cpu.sampler import SampledTokens


def load_share(first: FirstRank, start: Start, info: ModelInfo) -> Callable[[Message], None]:
    """Load the share of a rank. Return what does as the first rank says."""
    return FollowingRank(first, start, info).obey


class FollowingRank:
    """A rank that does as the first rank says, on the thread that computes."""

    def __init__(self, first: FirstRank, start: Start, info: ModelInfo) -> None:
        """Loads the share of the model."""
        self._first, self._ranks = first, meet(first, start)
        self._slots = SharedSlots(start.kv_file, self._ranks)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="aioserve-adapters")
        self._reading: dict[str, Future[object]] = {}  # adapters that no request has yet, by id
        self._model = ResidentModel(start.config, info, self._make)

    def obey(self, message: Message) -> None:
        """Do what a message says. What all have heard of that it cannot be done is left undone; for
        what else goes wrong this raises, and the rank ends.
        """
        with contextlib.suppress(SharedError):
            match message:
                case Step():
                    self._execute(message)
                case Load():
                    self._load(message)
                case Free():
                    self._model.free(weights=message.weights)
                case MakeHostBlocks():
                    with self._ranks.together():
                        slots = self._slots._replace(of_first=message.of_first)
                        self._model.make_host_blocks(message.num_bytes, slots)
                case ReadAdapter():
                    reading = self._reader.submit(self._read_adapter, message)
                    self._reading[message.adapter_id] = reading
                case UseAdapter():
                    self._use_adapter(message.adapter_id)
                case DropAdapter():
                    self._reading.pop(message.adapter_id, None)
                    self._model.drop_adapter(message.adapter_id)
                case _:
                    raise AssertionError(f"{type(message).__name__} comes at another time")

    def _execute(self, message: Step) -> None:
        assert self._model.executor is not None, "awake"
        with contextlib.suppress(RequestFailedError):
            self._model.executor.execute_model(message.step)

    def _load(self, message: Load) -> None:
        with self._ranks.together():
            info = read_same_model(message.model, self._model.info)
        self._model.load(info, message.cache)

    def _read_adapter(self, message: ReadAdapter) -> object:
        files = read_adapter(Path(message.path))
        if files.digest != message.digest:
            raise ConfigError(f"adapter {message.path} has changed while it was read")
        assert self._model.executor is not None, "awake"
        return self._model.executor.adapters.put(files)

    def _use_adapter(self, adapter_id: str) -> None:
        reading, executor = self._reading.pop(adapter_id), self._model.executor
        with self._ranks.together():
            adapter = reading.result()
        assert executor is not None, "awake"
        executor.adapters.load(adapter_id, adapter)

    def _make(self, config: EngineConfig, info: ModelInfo) -> StepExecutor:
        executor = load_on_cpu(config, info, ranks=self._ranks)
        executor.choose = self._choose
        return executor

    def _choose(self, *_: object) -> SampledTokens:
        """Return the tokens that the first rank has chosen."""
        sampled = self._first.hear(decode)
        assert isinstance(sampled, Sampled)
        if sampled.token_ids is None:
            raise RequestFailedError("the step has failed on the first rank")
        return SampledTokens(np.array(sampled.token_ids, dtype=np.int64), {})
