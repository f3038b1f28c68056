"""What sees, of a model that does: from the arrays of images to rows that its decoder reads.

First the part of the batch that knows which tokens of a step stand for which rows of which image
(an image may be some frames of a video); last the encoder of several ranks, of which the first
encodes.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from aioserve.config import EngineConfig
from aioserve.errors import one_line
from aioserve.features.multimodal.encoding_pieces import EncodingPieces
from aioserve.kv_cache import Ahead
from aioserve.model_source.info import ModelInfo
from aioserve.model_source.vision_families import GRID, TURN, Family, family_of
from aioserve.request import EncoderInput
from aioserve.runner.attention.backend import GivenRows, ImageEnds, IntArray, StepInputs
from aioserve.runner.batch.input_batch import BatchPart, EncoderPart
from aioserve.runner.fused.decoder import Place
from aioserve.runner.ranks import Ranks
from aioserve.scheduler.output import NewRequestData, SchedulerOutput


class Span(NamedTuple):
    """Tokens of one request in a step that stand for one image."""

    row: int  # of the step
    content_hash: str
    rows: slice  # of the image
    places: IntArray  # as many packed tokens of the step
    axes: IntArray | None  # [3, as many], if the model has axes


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    request_id: str
    items: Sequence[EncoderInput]
    places: IntArray  # positions that stand for a row of an image, ascending
    starts: IntArray  # the first of each image among these, and their number
    axes: IntArray | None  # [3, up to the end of the last image]
    ahead: int = 0  # by how much text behind the last image turns more than by its position

    def turns(self, positions: IntArray) -> IntArray:
        """Return the positions by which heads turn for tokens of text, and for others, which have
        axes, any that there are.
        """
        assert self.axes is not None, "of a model that has some"
        end = self.axes.shape[1]
        turns: IntArray = positions + self.ahead
        before = positions < end
        turns[before] = np.minimum(self.axes[0, positions[before]], positions[before])
        return turns


class ImageRows(BatchPart[_Row]):
    """The rows whose requests have images."""

    asked_by = "encoder_inputs"

    def __init__(self, token_ids: Sequence[int], merged: int | None = None) -> None:
        """Each of `token_ids` stands for one row of an image; `merged` x `merged` patches are one,
        if heads turn by axes.
        """
        super().__init__()
        self._token_ids, self._merged = tuple(token_ids), merged

    def set(self, row: int, request: NewRequestData) -> None:
        ids = np.asarray(request.token_ids[: request.num_prompt_tokens])
        is_row = np.isin(ids, self._token_ids)
        places = [
            item.position + np.flatnonzero(is_row[item.position : item.end])
            for item in request.encoder_inputs
        ]
        starts = np.cumsum([0, *map(len, places)])
        axes, ahead = None, 0
        if self._merged is not None:
            axes, following = _axes(request.encoder_inputs, places, self._merged)
            ahead = following - axes.shape[1]
        self.rows[row] = _Row(
            request.request_id, request.encoder_inputs, np.concatenate(places), starts, axes, ahead
        )

    def may_cut(self, row: int) -> bool:
        return False  # tokens of an image may see each other

    def items(self, chosen: Mapping[str, Iterable[int]]) -> Iterator[tuple[EncoderInput, int]]:
        """Yield the images `chosen` of requests in the batch, and how many rows each stands for."""
        for own in self.rows.values():
            for index in chosen.get(own.request_id, ()):
                yield own.items[index], int(own.starts[index + 1] - own.starts[index])

    def spans(self, inputs: StepInputs) -> Iterator[Span]:
        """Yield the tokens of this step that stand for images."""
        for row, own_row in enumerate(inputs.rows.tolist()):
            own = self.rows.get(own_row)
            if own is None:
                continue
            first = inputs.query_start_loc[row]
            begin, end = inputs.positions[first], inputs.seq_lens[row]
            low, high = np.searchsorted(own.places, (begin, end))
            if low == high:  # as of every decode
                continue
            for number, item in enumerate(own.items):
                start = own.starts[number]
                a, b = max(low, start), min(high, own.starts[number + 1])
                if a < b:
                    places = own.places[a:b]
                    yield Span(
                        row,
                        item.content_hash,
                        slice(a - start, b - start),
                        places - begin + first,
                        None if own.axes is None else own.axes[:, places],
                    )

    def turns(self, inputs: StepInputs) -> IntArray | None:
        """Return the positions by which heads of the T tokens turn, if not by their own."""
        if self._merged is None:
            return None
        turns = inputs.positions.copy()
        for index, row in enumerate(inputs.rows.tolist()):
            own = self.rows.get(row)
            if own is not None:
                part = slice(inputs.query_start_loc[index], inputs.query_start_loc[index + 1])
                turns[part] = own.turns(turns[part])
        return turns


def _axes(
    items: Sequence[EncoderInput], places: Sequence[IntArray], merged: int
) -> tuple[IntArray, int]:
    """[3, up to the end of the last image]: time, height and width (Qwen2-VL, arXiv 2409.12191);
    and the position at which text goes on behind it.

    The three of a token of text are the same. They go on behind height and width of an image or a
    video, as `generate` of `transformers` has it, though the time of a video may be further.
    """
    parts, end, following = [], 0, 0
    for item, own in zip(items, places, strict=True):
        assert item.arrays is not None, "refused at the door"
        time, height, width = item.arrays[GRID][0].tolist()
        sizes = (time, height // merged, width // merged)
        later, extent = 0, max(sizes[1:])
        if TURN in item.arrays:
            later, extent = item.arrays[TURN][0].tolist()
        text = following + np.arange(own[0] - end)
        following += len(text)
        image = np.indices(sizes).reshape(3, -1) + following
        image[0] += later
        parts += [np.tile(text, (3, 1)), image]
        following += extent
        end = own[-1] + 1
    return np.concatenate(parts, axis=1), following


# What sees, of a model that does: from the arrays of images to rows that its decoder reads. Keeps
# what it has made until it is told to drop it, by content. Knows modules of `transformers`, and
# steps as far as images go.


logger = logging.getLogger(__name__)

NOT_ENCODED = "an image of this request was not encoded before its tokens"  # a fault of ours


def num_deep_rows(config: Any) -> int:
    """Behind how many layers images add more rows, by the configuration of the whole model."""
    return len(getattr(config.vision_config, "deepstack_visual_indexes", ()))


def sees_images(info: ModelInfo) -> bool:
    """Return whether the model sees, and what sees of it is served."""
    if family_of(info) is None:
        return False
    return not getattr(info.whole_config, "quantization_config", None)


def encoder_cache_bytes(config: EngineConfig, info: ModelInfo, dtype: torch.dtype) -> int:
    """Return the bytes that outputs of the encoder of a model that sees may take."""
    size = info.hidden_size * dtype.itemsize * (1 + num_deep_rows(info.whole_config))
    return config.scheduler.encoder_cache_tokens * size


class ImageEncoder(ImageRows, EncoderPart):
    """Vision tower and projector of one model, and the part of the batch that reads its rows."""

    def __init__(self, module: Any, family: Family, token_ids: Sequence[int], place: Place) -> None:
        """`module`, the whole model, is at `place`; each of `token_ids` stands for a row in its
        prompts.
        """
        self.has_axes = family.axes  # whether the text model turns image tokens by three axes
        merged = module.config.vision_config.spatial_merge_size if family.axes else None
        super().__init__(token_ids, merged)
        self._module, self._family = module, family
        self._device = place.device
        # One image fills a card, and of several it would have to hold all activations.
        self._is_apart = family.apart or place.is_card
        self._dtype = next(module.parameters()).dtype
        self.num_parameters = sum(parameter.numel() for parameter in module.parameters())
        if family.unsqueezed:
            projector = module.get_submodule(family.unsqueezed)
            projector.register_forward_hook(lambda _, __, rows: rows[None])
        self._hidden_size = module.config.get_text_config().hidden_size
        self._width = self._hidden_size * (1 + num_deep_rows(module.config))
        self._pieces = EncodingPieces(module, is_on_card=place.is_card)
        self._made: dict[str, Tensor] = {}  # [n, hidden or a multiple] by content
        self._failures: dict[str, str] = {}  # why, by content
        self._gone: set[str] = set()  # contents that the step says to drop

    def use_thread(self, begin: Callable[[], None]) -> None:
        self._pieces.begin_thread = begin

    def blank(self, num_tokens: int) -> GivenRows:
        places = torch.arange(num_tokens, device=self._device)
        made = torch.zeros(num_tokens, self._width, dtype=self._dtype, device=self._device)
        rows, *deep = torch.split(made, self._hidden_size, dim=1)
        return GivenRows(places, rows, places.expand(3, -1) if self.has_axes else None, deep)

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
        """Return what tokens for images are given; a row fails whose image could not be encoded."""
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
            share = ahead.done / item.size
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
            key = (item.content_hash, *shapes) if self._is_apart else shapes
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
            array = torch.from_numpy(joined).to(self._device)
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
        """But for those of images that failed. Rows are where the model is, places and axes on the
        host.
        """
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


# The image encoder of several ranks: the first one encodes, and tells the others the rows. So an
# image that fails does so on all of them, and the encoder's weights are in memory once.


_FAILED = "the image could not be encoded on the first rank"  # which tells the client why


class SharedImageEncoder(ImageEncoder):
    """The part of it that one of `ranks` has."""

    def __init__(
        self, module: Any, family: Family, token_ids: Sequence[int], place: Place, ranks: Ranks
    ) -> None:
        super().__init__(module, family, token_ids, place)
        self._ranks = ranks
        if not ranks.is_first:
            self._module, self.num_parameters = None, 0

    def encode_ahead(self, ahead: Ahead) -> None:
        if self._ranks.is_first or ahead.is_last:
            super().encode_ahead(ahead)

    def encode(self, items: Iterable[tuple[EncoderInput, int]]) -> None:
        items, ranks = list(items), self._ranks
        if ranks.is_first:
            super().encode(items)
        hashes = [item.content_hash for item, _ in items]
        are_made = ranks.told_by_first([content in self._made for content in hashes])
        for (_, count), content, is_made in zip(items, hashes, are_made, strict=True):
            self._gone.discard(content)
            if not is_made:
                self._failures.setdefault(content, _FAILED)
                continue
            rows = self._made.get(content) if ranks.is_first else None
            if rows is None:
                rows = torch.empty(count, self._width, dtype=self._dtype, device=self._device)
            ranks.tell(rows)
            self._made[content] = rows
            self._failures.pop(content, None)
