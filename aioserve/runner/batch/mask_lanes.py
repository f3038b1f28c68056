"""Makes the masks of a step within a time budget, on threads beside the step.

Most masks take some 50 microseconds. One that takes a hundred times that is some client's pattern,
and must not keep the others: it moves to a lane of its own, and a row whose mask is not there in
time sits the step out. Its mask goes on meanwhile, and serves the next step. Rows that have said
the same under the same grammar share one mask, or the reason why there is none.

A lexer makes its states as a text needs them, and no call tells how much memory they take. So what
slow masks take is measured, as the memory by which the process grows meanwhile, and never more than
such a library can fill in that time; all rows together have `MAX_ROW_BYTES`. Masks that are not
slow are not measured: a row has as many states as llguidance's limits allow, some 50 MiB at most.
Knows matchers and rows of words; knows no requests and no logits.
"""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Protocol

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int32]

#: Seconds for which a step waits for masks once its forward pass is done, if all of its rows can
#: sit out; after the other one, rows that cannot are ended.
STEP_SECONDS, LAST_SECONDS = 0.05, 1.0
SLOW_SECONDS = 0.004  # of processor time: a mask, or a call that holds the GIL
MAX_ROW_SECONDS = 20.0  # of processor time for the slow masks of one row
MAX_ROW_BYTES = 1 << 27  # of memory that all rows have taken beyond their compiled grammars
BYTES_PER_SECOND = 1 << 28  # that llguidance was seen to fill at most
TOO_SLOW = f"its masks have taken more than {MAX_ROW_SECONDS:g} s of processor time"
NOT_IN_TIME = f"a mask was not made within {LAST_SECONDS:g} s"
TOO_LARGE = f"grammars in use take more than {MAX_ROW_BYTES >> 20} MiB of memory, its own the most"


class Matcher(Protocol):
    """What is used here of llguidance's `LLMatcher`: a place in a text that is bound."""

    def is_stopped(self) -> bool:
        """Whether nothing but the end may follow."""

    def is_error(self) -> bool:
        """Whether it cannot be followed further."""

    def get_error(self) -> str:
        """Why it cannot be followed further."""

    def unsafe_compute_mask_ptr(self, pointer: int, num_bytes: int) -> None:
        """Write the mask of the next token to memory."""

    def compute_ff_tokens(self) -> list[int]:
        """The next tokens, as far as there is no choice."""

    def validate_tokens(self, token_ids: list[int]) -> int:
        """How many of `token_ids` may follow."""

    def consume_tokens(self, token_ids: list[int]) -> bool:
        """Read tokens that are never rolled back; False if they are not allowed."""

    def try_consume_tokens(self, token_ids: list[int]) -> int:
        """Read tokens that may be rolled back; how many are allowed."""

    def rollback(self, num_tokens: int) -> bool:
        """Take the last tokens back."""


class MaskJob:
    """The masks of one row, or of rows that have said the same, and of what follows its guesses."""

    __slots__ = (
        *("error", "future", "grown", "guesses", "is_done", "is_masked", "matcher"),
        *("seconds", "unread", "words"),
    )

    def __init__(
        self,
        matcher: Matcher,
        guesses: Sequence[int],
        num_words: int,
        unread: Sequence[int] = (),
        *,
        is_masked: bool = False,
    ) -> None:
        """`unread` are tokens that the matcher has to read before. If it `is_masked`, it has made a
        mask since it has read the last one.
        """
        self.matcher, self.guesses = matcher, list(guesses)
        self.unread, self.is_masked = unread, is_masked
        self.is_done = False
        self.words: Words = np.empty((1 + len(guesses), num_words), dtype=np.int32)
        self.error: BaseException | str | None = None  # why there is no mask
        self.seconds = 0.0  # of processor time
        self.grown = 0  # bytes by which the process has grown, if that was measured
        self.future: Future[None] | None = None  # done when it is, or later


class MaskLanes:
    """Two threads: one for masks, and one for those that take long."""

    def __init__(self, only_eos: Words) -> None:
        """`only_eos`: the mask of a text that is over."""
        self._only_eos = only_eos
        self._threads: dict[bool, ThreadPoolExecutor] = {}

    def start(self, jobs: Sequence[MaskJob], *, is_slow: bool) -> None:
        """Do them in this order, on the lane of slow masks one by one."""
        for some in [[job] for job in jobs] if is_slow else [jobs] if jobs else ():
            if is_slow not in self._threads:
                name = "aioserve-slow-masks" if is_slow else "aioserve-masks"
                self._threads[is_slow] = ThreadPoolExecutor(1, thread_name_prefix=name)
            future = self._threads[is_slow].submit(self._run, some, is_slow)
            for job in some:
                job.future = future

    def close(self) -> None:
        """Let the threads end. Idempotent."""
        for thread in self._threads.values():
            thread.shutdown(cancel_futures=True)

    # What follows runs on the threads.

    def _run(self, jobs: Sequence[MaskJob], is_slow: bool) -> None:
        for job in jobs:
            before, began = _resident() if is_slow else 0, time.thread_time()
            try:
                job.error = self._fill(job)
            except BaseException as error:
                job.error = error
            job.seconds = time.thread_time() - began
            if is_slow:
                grown = max(_resident() - before, 0)
                job.grown = min(grown, int(job.seconds * BYTES_PER_SECOND))
            elif job.seconds > SLOW_SECONDS:
                job.grown = int(job.seconds * BYTES_PER_SECOND)
            job.is_done = True

    def _fill(self, job: MaskJob) -> str | None:
        matcher, words = job.matcher, job.words
        is_masked = job.is_masked
        for token_id in job.unread:
            if matcher.is_stopped():
                break
            if not is_masked:  # it lets other threads run, and then there is little left to read
                matcher.unsafe_compute_mask_ptr(words.ctypes.data, words[0].nbytes)
            matcher.consume_tokens([token_id])
            is_masked = False
        error = fill(matcher, words[0], self._only_eos)
        num_taken = 0
        for step, token_id in enumerate(job.guesses, start=1):
            if num_taken == step - 1 and not matcher.is_stopped():
                num_taken += matcher.try_consume_tokens([token_id])
            if num_taken == step:
                error = fill(matcher, words[step], self._only_eos) or error
            else:  # never looked at: the guess before it is wrong
                words[step] = self._only_eos
        if num_taken:
            matcher.rollback(num_taken)
        return error


def fill(matcher: Matcher, words: Words, only_eos: Words) -> str | None:
    """Write the mask of the next token to `words`. Returns why it cannot be followed, if so."""
    if not matcher.is_stopped():  # else the end may follow, and nothing else
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if not matcher.is_error():
            return None
    words[:] = only_eos
    return matcher.get_error() if matcher.is_error() else None


def wait_for(jobs: Sequence[MaskJob], seconds: float) -> None:
    """Return when all are done, or after `seconds`."""
    wait({job.future for job in jobs if not job.is_done and job.future is not None}, seconds)


def timed(call: Callable[[], list[int]]) -> tuple[list[int], bool]:
    """What a call returns, and whether it took long."""
    began = time.thread_time()
    result = call()
    return result, time.thread_time() - began > SLOW_SECONDS


def _resident() -> int:
    """Bytes of memory that are this process's own; 0 where Linux is not."""
    try:
        with open("/proc/self/statm", "rb") as file:
            _, resident, shared = map(int, file.read().split()[:3])
    except OSError:
        return 0
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")
