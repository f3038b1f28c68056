"""Passes of a drafting model on the CPU: on a pool of blocks of its own, by the usual sampler.

Knows steps; knows nothing about what is guessed for which request.
"""

from aioserve.features.spec_decode.model_drafter import DraftRunner, Forward
from aioserve.runner.attention.backend import ModelInputs, StepInputs
from aioserve.runner.batch.masks import Masks
from aioserve.runner.batch.sampling_columns import SamplingInputs
from aioserve.runner.cpu.kv_memory import AttentionBackend
from aioserve.runner.cpu.sampler import sample


class CpuDraftRunner(DraftRunner):
    """A runner of a draft model on a CPU, used on the thread that computes."""

    def __init__(self, backend: AttentionBackend, block_size: int) -> None:
        self.backend = backend
        self._block_size = block_size
        self.num_blocks = backend.memory.num_blocks
        self.num_slots = self.num_blocks * block_size
        self.caches = [*backend.memory.key_caches, *backend.memory.value_caches]

    def draw(
        self, step: StepInputs, forward: Forward, columns: SamplingInputs, masks: Masks | None
    ) -> list[int]:
        self.backend.memory.commit(int(step.slot_mapping.max()) // self._block_size + 1)
        self.backend.prepare(step)
        logits = forward(ModelInputs.of(step), self.backend)
        if not len(step.sampling):
            return []
        token_ids: list[int] = sample(logits, columns, masks).token_ids.tolist()
        return token_ids

    def close(self) -> None:
        self.backend.close()
