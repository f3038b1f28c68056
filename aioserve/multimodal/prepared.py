"""Images and videos that a processor has prepared, and their places in a text and in its tokens.

An image is one input of the encoder. A video is several, each of some of its frames. Knows no
processor and no model.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from aioserve.errors import RequestError
from aioserve.request import EncoderInput


class PreparedInput(NamedTuple):
    """What the encoder reads at once."""

    num_rows: int  # how many tokens of the prompt the encoder has a row for
    arrays: dict[str, np.ndarray]
    content_hash: str

    @classmethod
    def of(cls, model_type: str, num_rows: int, arrays: dict[str, np.ndarray]) -> "PreparedInput":
        """With the hash of `arrays`."""
        digest = hashlib.sha256(model_type.encode())
        for name, array in arrays.items():
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(array.data)
        return cls(num_rows, arrays, digest.hexdigest()[:32])


class Prepared(NamedTuple):
    """What became of one image or video."""

    text: str  # what stands in its place in the prompt
    inputs: Sequence[PreparedInput]  # in the order of their tokens


class Mark(NamedTuple):
    """How prompts of a model mention images, or videos."""

    kind: str  # "image" or "video"
    placeholder: str  # in a text, one for each
    token_id: int  # in the tokens, one for each row of the encoder


#: By kind, those of one prompt in its order.
AllPrepared = Mapping[str, Sequence[Prepared]]


class Marks:
    """The marks by which prompts of one model mention images and videos."""

    def __init__(self, marks: Sequence[Mark], together: bool) -> None:
        """`together`: whether the tokens of an input see each other in both directions."""
        self._marks, self._together = marks, together
        self._placeholders = re.compile("|".join(re.escape(mark.placeholder) for mark in marks))

    def check_counts(self, text: str, counts: Mapping[str, int]) -> None:
        """Raises `RequestError` unless `text` mentions as many of each kind as `counts` has."""
        for kind, placeholder, _ in self._marks:
            mentioned, num_given = text.count(placeholder), counts.get(kind, 0)
            if mentioned != num_given:
                raise RequestError(
                    f"the prompt mentions {mentioned} {kind}s ({placeholder!r}), and {num_given} "
                    "come with it",
                    param="prompt",
                )

    def expand(self, text: str, prepared: AllPrepared) -> str:
        """A text that `check_counts` has let pass, with all that images and videos stand for."""
        texts = {
            mark.placeholder: iter([own.text for own in prepared.get(mark.kind, ())])
            for mark in self._marks
        }
        return self._placeholders.sub(lambda match: next(texts[match[0]]), text)

    def place(
        self, token_ids: list[int], prepared: AllPrepared
    ) -> tuple[list[EncoderInput], list[str]]:
        """Where in the tokens of such a text the inputs are, in order, and the name of each, as
        `images[i]` or `videos[i]`.
        """
        found = [
            placed
            for mark in self._marks
            for placed in self._place(mark, token_ids, prepared.get(mark.kind, ()))
        ]
        found.sort(key=lambda placed: placed[0].position)
        return [item for item, _ in found], [name for _, name in found]

    def _place(
        self, mark: Mark, token_ids: list[int], prepared: Sequence[Prepared]
    ) -> list[tuple[EncoderInput, str]]:
        places = np.flatnonzero(np.asarray(token_ids) == mark.token_id)
        num_rows = sum(one.num_rows for own in prepared for one in own.inputs)
        if prepared and len(places) != num_rows:
            raise RequestError(
                f"the prompt has {len(places)} tokens of {mark.kind}s, but its {mark.kind}s are "
                f"{num_rows}",
                param="prompt",
            )
        found, first = [], 0
        for i, own in enumerate(prepared):
            for one in own.inputs:
                begin, end = int(places[first]), int(places[first + one.num_rows - 1]) + 1
                item = EncoderInput(
                    begin, end - begin, one.content_hash, one.arrays, self._together
                )
                found.append((item, f"{mark.kind}s[{i}]"))
                first += one.num_rows
        return found
