"""The quality of experience of a reader, as Andes has it: how late tokens are for a reader.

Liu et al., "Andes: Defining and Enhancing Quality-of-Experience in LLM-Based Text Streaming
Services", 2024 (arXiv 2404.16283). Knows one reply at a time.
"""

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.errors import ConfigError

Floats = npt.NDArray[np.float64]

DEFAULT_TTFT = 1.0  # seconds; what the paper takes for readers of chats


class Reader(msgspec.Struct, frozen=True):
    """Reads `speed` tokens a second, and expects the first after `ttft` seconds."""

    speed: float
    ttft: float = DEFAULT_TTFT

    @classmethod
    def parse(cls, text: str) -> "Reader":
        """Parse `5` tokens per second, or `5,ttft=2`. Raises `ConfigError`."""
        speed, comma, ttft = text.partition(",ttft=")
        try:
            reader = cls(float(speed), float(ttft) if comma else DEFAULT_TTFT)
        except ValueError:
            reader = cls(0.0)
        if not (0 < reader.speed < np.inf and 0 <= reader.ttft < np.inf):
            raise ConfigError(
                "the reading speed must be tokens per second above 0 such as 5, or with the "
                f"expected time to the first token such as 5,ttft=1; got {text!r}"
            )
        return reader

    def quality(self, token_times: Floats, num_tokens: int, end: float) -> float:
        """The quality, from 0 to 1, of a reply of `num_tokens` tokens that ended `end` seconds
        after its arrival and whose tokens came at `token_times`: 1 if each was there when it was to
        be read.

        The reader expects token k at e(k) = ttft + (k - 1) / speed, and reads it at r(k), when it
        has come and the one before is read, but no sooner than expected. The time to read one is
        1 / speed, and L is the end of reading. The quality is 1 - lost / whole: the sum of
        r(k) - e(k), over the area under the expected curve up to L. Of a token that never came,
        all of its area is lost.
        """
        pace = 1 / self.speed
        expected = self.ttft + pace * np.arange(num_tokens)
        came = token_times[:num_tokens]
        # r(k) - e(k) is the largest lateness of any token up to k: reading catches nothing up.
        late = np.maximum.accumulate(np.maximum(came - expected[: len(came)], 0.0))
        is_whole = len(came) == num_tokens
        last = late[-1] if len(came) else 0.0
        reading_end = expected[-1] + last + pace
        if not is_whole:
            reading_end = max(reading_end, end)
        areas = reading_end - expected - pace / 2
        lost = float(np.sum(late)) + float(np.sum(areas[len(came) :]))
        return 1 - lost / float(np.sum(areas))
