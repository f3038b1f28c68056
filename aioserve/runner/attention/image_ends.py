"""How far tokens of images see ahead, where those of one image see each other (Gemma 3, Gemma 4).

Knows tokens and positions; knows no attention that uses it.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


class ImageEnds(NamedTuple):
    """How many positions of its row each of the T tokens of a step sees, from the first one or, in
    layers with a sliding window, from the first one in the window of the token itself.
    """

    ends: IntArray  # T: to the token itself or, in an image, to the last token of the image
    only_in_windows: bool  # whether layers that have no window see what is before a token alone

    @classmethod
    def of(
        cls, positions: IntArray, places: Iterable[IntArray], *, only_in_windows: bool
    ) -> "ImageEnds | None":
        """Of the `positions` [T] of a step whose images are at `places`: ascending packed tokens,
        of each image all. Those without a gap between them see each other. None if there is none.
        """
        ends, is_any = positions + 1, False
        for own in places:
            gaps = np.flatnonzero(np.diff(own) != 1) + 1
            for part in np.split(own, gaps):
                ends[part] = positions[part[-1]] + 1
                is_any = True
        return cls(ends, only_in_windows) if is_any else None

    def within(self, window: int | None) -> IntArray | None:
        """`ends`, or None for a layer of that sliding window whose tokens do not see ahead."""
        return None if self.only_in_windows and window is None else self.ends


def ends_seen(image_ends: ImageEnds | None, positions: IntArray, window: int | None) -> IntArray:
    """[T] behind the last position that each token at `positions` [T] sees in such a layer."""
    ends = image_ends and image_ends.within(window)
    return positions + 1 if ends is None else ends
