"""Passes of a drafting model on a device: planned, staged and launched as steps are, and awaited.

They take turns with the steps of the served model, whose sampler they use. Knows steps; knows
nothing about what is guessed for which request.
"""

import numpy as np
from torch import Tensor

from aioserve.features.spec_decode.model_drafter import DraftRunner, Forward
from aioserve.gpu.cuda.attention import DeviceAttention
from aioserve.gpu.cuda.device import Device, StagingRing
from aioserve.gpu.cuda.plan import Layout, plan_step
from aioserve.gpu.cuda.sampler import DeviceSampler
from aioserve.runner.attention.backend import ModelInputs, StepInputs
from aioserve.runner.batch.masks import Masks
from aioserve.runner.batch.sampling_columns import SamplingInputs


class DeviceDraftRunner(DraftRunner):
    """A runner of a draft model, used on the thread that launches, without CUDA graphs."""

    def __init__(
        self,
        device: Device,
        attention: DeviceAttention,
        sampler: DeviceSampler,
        layout: Layout,
        arena: Tensor,
    ) -> None:
        """`arena` [layout.size], int32 on the device, is for these passes alone."""
        limits = layout.limits
        self.num_blocks = limits.num_pages
        self.num_slots = (limits.num_pages + 1) * limits.page_size  # the dummy page included
        self._device, self._attention, self._sampler = device, attention, sampler
        self._layout, self._arena, self._arrays = layout, arena, layout.split(arena)
        self._ring = StagingRing(device, layout.size)
        self._result = device.host_buffer(limits.num_rows)

    def draw(
        self, step: StepInputs, forward: Forward, columns: SamplingInputs, masks: Masks | None
    ) -> list[int]:
        buffer = self._ring.take()
        plan = plan_step(step, columns, self._layout, buffer.array)
        assert (np.diff(plan.places) == 1).all(), "rows of one token come first"
        self._device.stage(self._arena[: plan.num_words], buffer)
        attention = self._attention.begin(plan, self._arrays)
        self._ring.guard()
        sampling = self._sampler.prepare(plan, [], {})
        staged = None if masks is None else self._sampler.stage_masks(masks)
        num_tokens, num_sampling = plan.num_tokens, plan.num_sampling

        def work() -> None:
            arrays = self._arrays
            inputs = ModelInputs(
                input_ids=arrays.input_ids[:num_tokens].long(),
                positions=arrays.positions[:num_tokens].long(),
                slots=arrays.slots[:num_tokens].long(),
                logits_rows=arrays.logits_rows[:num_sampling].long(),
            )
            logits = forward(inputs, attention)
            if num_sampling:
                self._sampler.sample(logits, sampling, arrays, staged)

        self._device.launch(work)
        self._device.fetch(self._result, self._sampler.out[:num_sampling])
        self._device.record().wait()
        # Where the model gives no numbers, any guess does.
        token_ids: list[int] = np.maximum(self._result.array[:num_sampling], 0).tolist()
        return token_ids

    def close(self) -> None:
        """Its memory goes with it."""
