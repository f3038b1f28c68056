"""What sees, of a model that does: from the arrays of images to rows that its decoder reads.

Keeps what it has made until it is told to drop it, by content. Knows modules of `transformers`, and
steps as far as images go.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aioserve.config import EngineConfig
from aioserve.errors import one_line
from aioserve.kv_cache import Ahead
from aioserve.model_info import ModelInfo
from aioserve.multimodal.families import Family, family_of
from aioserve.request import EncoderInput
from aioserve.runner.attention.backend import GivenRows, StepInputs
from aioserve.runner.attention.image_ends import ImageEnds
from aioserve.runner.multimodal.encoding_pieces import EncodingPieces
from aioserve.runner.multimodal.image_rows import ImageRows, Span
from aioserve.scheduler.output import SchedulerOutput

logger = logging.getLogger(__name__)

NOT_ENCODED = "an image of this request was not encoded before its tokens"  # a fault of ours


def num_deep_rows(config: Any) -> int:
    """Behind how many layers images add more rows, by the configuration of the whole model."""
    return len(getattr(config.vision_config, "deepstack_visual_indexes", ()))


def sees_images(info: ModelInfo) -> bool:
    """Whether the model sees, and what sees of it is served."""
    if family_of(info) is None:
        return False
    return not getattr(info.whole_config, "quantization_config", None)


def encoder_cache_bytes(
    config: EngineConfig, info: ModelInfo, dtype: torch.dtype, sees: bool
) -> int:
    """The bytes that outputs of the encoder may take, if the model `sees`."""
    if not sees:
        return 0
    size = info.hidden_size * dtype.itemsize * (1 + num_deep_rows(info.whole_config))
    return config.scheduler.encoder_cache_tokens * size


class ImageEncoder(ImageRows):
    """Vision tower and projector of one model, and the part of the batch that reads its rows."""

    def __init__(self, module: Any, family: Family, token_ids: Sequence[int]) -> None:
        """`module` is the whole model; each of `token_ids` stands for a row in its prompts."""
        self.has_axes = family.axes  # whether the text model turns image tokens by three axes
        merged = module.config.vision_config.spatial_merge_size if family.axes else None
        super().__init__(token_ids, merged)
        self._module, self._family = module, family
        self._dtype = next(module.parameters()).dtype
        self.num_parameters = sum(parameter.numel() for parameter in module.parameters())
        if family.unsqueezed:
            projector = module.get_submodule(family.unsqueezed)
            projector.register_forward_hook(lambda _, __, rows: rows[None])
        self._hidden_size = module.config.get_text_config().hidden_size
        self._pieces = EncodingPieces(module)
        self._made: dict[str, Tensor] = {}  # [n, hidden or a multiple] by content
        self._failures: dict[str, str] = {}  # why, by content
        self._gone: set[str] = set()  # of these, what the step says to drop

    def attend_by(self, name: str) -> None:
        """Let its layers attend by what `transformers` has registered under that name."""
        from transformers import PreTrainedModel

        for part in [] if self._module is None else self._module.modules():
            # what holds others would give it to them too; the text model is one, and keeps its own
            is_leaf = isinstance(part, PreTrainedModel) and not part.config.sub_configs
            if is_leaf and part.config is not self._module.config.get_text_config():
                part.set_attn_implementation(name)

    def forget(self, content_hashes: Iterable[str]) -> None:
        """Drop what was made of these images. To be called with every step: that they failed is
        known until the next, as a request that comes with this one may have found blocks that were
        computed without them.
        """
        for content_hash in self._gone:
            self._failures.pop(content_hash, None)
        self._gone = set(content_hashes)
        for content_hash in self._gone:
            self._made.pop(content_hash, None)
            self._pieces.drop(content_hash)

    def run(self, step: SchedulerOutput) -> None:
        """Drop and encode what the step says, before it is prepared."""
        self.forget(step.free_encoder_hashes)
        if step.scheduled_encoder_inputs:
            self.encode(self.items(step.scheduled_encoder_inputs))
        if (ahead := Ahead.of(step.parts)) is not None:
            self.encode_ahead(ahead)

    def prepare(self, inputs: StepInputs, step: SchedulerOutput) -> StepInputs:
        """What tokens for images are given; a row fails whose image could not be encoded."""
        spans = list(self.spans(inputs))
        for span in spans:
            if span.content_hash not in self._made:
                why = self._failures.get(span.content_hash, NOT_ENCODED)
                self.errors[int(inputs.rows[span.row])] = why
        if self._failures:
            # A new request may have found blocks that were computed without the image.
            new = {request.request_id for request in step.scheduled_new_reqs}
            for row, own in self.rows.items():
                for item in own.items if own.request_id in new else ():
                    if item.content_hash in self._failures:
                        self.errors[row] = self._failures[item.content_hash]
        if not spans and self._merged is None:
            return inputs
        ends = None
        if self._family.together:
            ends = ImageEnds.of(
                inputs.positions,
                (span.places for span in spans),
                only_in_windows=self._family.together_in_windows,
            )
        return replace(inputs, given=self._give(spans), turns=self.turns(inputs), image_ends=ends)

    def encode_ahead(self, ahead: Ahead) -> None:
        """A part of an image, or the rest of it."""
        item = ahead.item
        if ahead.is_last:
            self.encode([(item, sum(map(ahead.token_ids.count, self._token_ids)))])
        else:
            self._gone.discard(item.content_hash)
            share = ahead.done / item.num_tokens
            self._pieces.advance(item.content_hash, lambda: self._rows_of([item]), share)

    def close(self) -> None:
        self._pieces.close()
        super().close()

    @torch.inference_mode()
    def encode(self, items: Iterable[tuple[EncoderInput, int]]) -> None:
        """Make the rows of these (image, number of rows). An image that fails does so alone."""
        batches: dict[tuple[Any, ...], list[tuple[EncoderInput, int]]] = {}
        for item, count in items:
            assert item.arrays is not None, "refused at the door"
            self._gone.discard(item.content_hash)  # what is made of it now is news
            shapes = tuple(array.shape[1:] for array in item.arrays.values())
            key = (item.content_hash, *shapes) if self._family.apart else shapes
            if item.content_hash in self._pieces:
                key = (item.content_hash,)
            batches.setdefault(key, []).append((item, count))
        for batch in batches.values():
            try:
                self._encode(batch)
            except Exception as error:  # code of any kind of model
                if len(batch) == 1:
                    self._note(batch[0][0], error)
                    continue
                for one in batch:
                    try:
                        self._encode([one])
                    except Exception as own_error:
                        self._note(one[0], own_error)

    def _encode(self, batch: list[tuple[EncoderInput, int]]) -> None:
        """All at once: each is in rows of its own of the arrays."""
        rows = self._pieces.take(batch[0][0].content_hash)
        if rows is None:
            rows = self._rows_of([item for item, _ in batch])
        counts = [count for _, count in batch]
        if len(rows) != sum(counts):
            raise ValueError(f"{len(rows)} rows for {sum(counts)} tokens")
        begin = 0
        for (item, _), end in zip(batch, np.cumsum(counts).tolist(), strict=True):
            # of its own memory: they are dropped one by one
            self._made[item.content_hash] = rows[begin:end].clone()
            self._failures.pop(item.content_hash, None)
            begin = end

    def _rows_of(self, items: Sequence[EncoderInput]) -> Tensor:
        """[n, hidden or a multiple] of all of them, in turn."""
        arguments: dict[str, Tensor] = {}
        for name in self._family.arrays:
            joined = np.concatenate([item.arrays[name] for item in items if item.arrays])
            array = torch.from_numpy(joined)
            arguments[name] = array.to(self._dtype) if array.is_floating_point() else array
        found = self._module.get_image_features(**arguments, return_dict=True)
        if self._family.projector:
            project = self._module.get_submodule(self._family.projector)
            rows = _joined(project(found.last_hidden_state))
        else:
            rows = _joined(found.pooler_output)
        for deep in getattr(found, "deepstack_features", None) or ():  # side by side
            rows = torch.cat((rows, _joined(deep)), dim=1)
        return rows

    def _give(self, spans: list[Span]) -> GivenRows | None:
        """But for those of images that failed."""
        found = [
            (span.places, self._made[span.content_hash][span.rows], span.axes)
            for span in spans
            if span.content_hash in self._made
        ]
        if not found:
            return None
        places, made, axes = zip(*found, strict=True)
        turned = None
        if self._family.axes:
            turned = torch.from_numpy(np.concatenate(axes, axis=1))
        rows, *deep = torch.split(torch.cat(made), self._hidden_size, dim=1)
        return GivenRows(torch.from_numpy(np.concatenate(places)), rows, turned, deep)

    def _note(self, item: EncoderInput, error: Exception) -> None:
        logger.error("an image could not be encoded: %s", error, exc_info=error)
        said = f"an image of this request could not be encoded: {one_line(error)}"
        self._failures[item.content_hash] = said
        self._made.pop(item.content_hash, None)


def _joined(parts: Iterable[Tensor]) -> Tensor:
    """[n, hidden] of all images, whatever shapes they come in."""
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
