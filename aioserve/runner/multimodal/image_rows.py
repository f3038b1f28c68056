"""Where in the batch images are: which tokens of a step stand for which rows of which image.

An image may be some frames of a video. Knows tokens and positions; knows no pixels and no model.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from aioserve.multimodal.families import GRID, TURN
from aioserve.request import EncoderInput
from aioserve.runner.attention.backend import IntArray, StepInputs
from aioserve.runner.batch.batch_part import BatchPart
from aioserve.scheduler.output import NewRequestData


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
        """The positions by which heads turn for tokens of text, and for others, which have axes,
        any that there are.
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
        """The images `chosen` of requests in the batch, and how many rows each stands for."""
        for own in self.rows.values():
            for index in chosen.get(own.request_id, ()):
                yield own.items[index], int(own.starts[index + 1] - own.starts[index])

    def spans(self, inputs: StepInputs) -> Iterator[Span]:
        """The tokens of this step that stand for images."""
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
        """The positions by which heads of the T tokens turn, if not by their own."""
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
