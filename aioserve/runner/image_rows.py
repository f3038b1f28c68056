"""Where in the batch images are: which tokens of a step stand for which rows of which image.

Knows tokens and positions; knows no pixels and no model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from aioserve.request import EncoderInput
from aioserve.runner.attention.backend import IntArray, StepInputs
from aioserve.scheduler.output import NewRequestData


class Span(NamedTuple):
    """Tokens of one request in a step that stand for one image."""

    request_id: str
    content_hash: str
    rows: slice  # of the image
    places: IntArray  # as many packed tokens of the step


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    items: Sequence[EncoderInput]
    places: IntArray  # positions that stand for a row of an image, ascending
    starts: IntArray  # the first of each image among these, and their number


class ImageRows:
    """Those requests in the batch that have images."""

    def __init__(self, token_id: int) -> None:
        """`token_id` stands for one row of an image."""
        self._token_id = token_id
        self._rows: dict[str, _Row] = {}

    def set(self, request: NewRequestData) -> None:
        """It is in the batch from now on."""
        if not request.encoder_inputs:
            return
        ids = np.asarray(request.token_ids[: request.num_prompt_tokens])
        places = [
            item.position + np.flatnonzero(ids[item.position : item.end] == self._token_id)
            for item in request.encoder_inputs
        ]
        starts = np.cumsum([0, *map(len, places)])
        self._rows[request.request_id] = _Row(
            request.encoder_inputs, np.concatenate(places), starts
        )

    def drop(self, request_id: str) -> None:
        """It is in the batch no longer."""
        self._rows.pop(request_id, None)

    def item(self, request_id: str, index: int) -> tuple[EncoderInput, int]:
        """An image of a request, and how many rows it stands for."""
        own = self._rows[request_id]
        return own.items[index], int(own.starts[index + 1] - own.starts[index])

    def spans(self, inputs: StepInputs) -> Iterator[Span]:
        """The tokens of this step that stand for images."""
        if not self._rows:
            return
        for row, request_id in enumerate(inputs.req_ids):
            own = self._rows.get(request_id)
            if own is None:
                continue
            first = inputs.query_start_loc[row]
            begin, end = inputs.positions[first], inputs.seq_lens[row]
            low, high = np.searchsorted(own.places, (begin, end))
            for number, item in enumerate(own.items):
                start = own.starts[number]
                a, b = max(low, start), min(high, own.starts[number + 1])
                if a < b:
                    places = own.places[a:b] - begin + first
                    yield Span(request_id, item.content_hash, slice(a - start, b - start), places)
