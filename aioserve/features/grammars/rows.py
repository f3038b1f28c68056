"""Where each row of the persistent batch stands in its grammar, and which tokens may come next.

Masks are made on threads of their own while the step computes, within bounds of time and memory
that come first: a row whose mask comes too late sits the step out. Knows rows and token ids; knows
nothing about logits, nor how grammars are compiled.
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol
from weakref import WeakSet

import numpy as np

from aioserve.errors import GrammarLimitError, first_line
from aioserve.runner.attention.backend import IntArray
from aioserve.runner.batch.masks import NO_DRAFTS, BoundRows, Masks, Standing, StepMasks, Words
from aioserve.runner.interface import step_failed
from aioserve.scheduler.output import NewRequestData

if TYPE_CHECKING:
    from aioserve.features.grammars import GrammarCompiler


#: Seconds for which a step waits for masks once its forward pass is done, if all of its rows can
#: sit out; after the other one, rows that cannot are ended.
STEP_SECONDS, LAST_SECONDS = 0.05, 1.0
SLOW_SECONDS = 0.004  # of processor time: a mask, or a call that holds the GIL
#: Of processor time in which the step's thread reads the tokens of one row, holding the GIL: beyond
#: both, in all and for each token, they are read beside the step. JSON takes 2 us a token, right
#: recursion 3 ms after 1,900: for 128 samples of it a step would stand for 0.4 s.
READ_SECONDS, TOKEN_SECONDS = 0.01, 0.00005
#: Beside the step as well, other threads wait for the GIL while a token is read. A token that takes
#: PAUSE_FROM seconds or more is followed by a pause, in which they have the GIL: PAUSES times as
#: long as the token took, and MAX_PAUSE seconds at most.
PAUSE_FROM, PAUSES, MAX_PAUSE = 0.0003, 6, 0.05
PIECE = 16  # tokens that are read at once of a text that goes on
MAX_ROW_SECONDS = 20.0  # of processor time for the slow masks of one row
MAX_ROW_BYTES = 1 << 27  # of memory that all rows have taken beyond their compiled grammars
BYTES_PER_SECOND = 1 << 28  # that llguidance was seen to fill at most
TOO_SLOW = f"its masks have taken more than {MAX_ROW_SECONDS:g} s of processor time"
NOT_IN_TIME = f"a mask was not made within {LAST_SECONDS:g} s"
TOO_LARGE = f"grammars in use take more than {MAX_ROW_BYTES >> 20} MiB of memory, its own the most"


class Matcher(Protocol):
    """The part of llguidance's `LLMatcher` that is used here: a place in a text that is bound."""

    def is_stopped(self) -> bool:
        """Return whether nothing but the end may follow."""

    def is_error(self) -> bool:
        """Return whether the grammar cannot be followed further."""

    def get_error(self) -> str:
        """Return why the grammar cannot be followed further."""

    def unsafe_compute_mask_ptr(self, pointer: int, num_bytes: int) -> None:
        """Write the mask of the next token to memory."""

    def compute_ff_tokens(self) -> list[int]:
        """Return the next tokens, as far as there is no choice."""

    def validate_tokens(self, token_ids: list[int]) -> int:
        """Return how many of `token_ids` may follow."""

    def consume_tokens(self, token_ids: list[int]) -> bool:
        """Read tokens that are never rolled back; False if they are not allowed."""

    def try_consume_tokens(self, token_ids: list[int]) -> int:
        """Read tokens that may be rolled back; how many are allowed."""

    def rollback(self, num_tokens: int) -> bool:
        """Undo the last `num_tokens` tokens. False: the grammar cannot."""


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
        """End the threads that compute masks. Idempotent."""
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
            began = time.thread_time()
            matcher.consume_tokens([token_id])
            is_masked = False
            if (seconds := time.thread_time() - began) > PAUSE_FROM:
                time.sleep(min(PAUSES * seconds, MAX_PAUSE))
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
    """Return what a call returns, and whether it took long."""
    began = time.thread_time()
    result = call()
    return result, time.thread_time() - began > SLOW_SECONDS


def _resident() -> int:
    """Return bytes of memory that are this process's own; 0 where Linux is not."""
    try:
        with open("/proc/self/statm", "rb") as file:
            _, resident, shared = map(int, file.read().split()[:3])
    except OSError:
        return 0
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


# The rows of the batch that have grammars, and the masks of their steps.


logger = logging.getLogger(__name__)

# Tokens without a choice that are sent along at a time. With the token before them they are 16:
# up to that number, a CPU's kernels give each token the bits that a step of this token alone gives.
MAX_GUESSES = 15


@dataclass(slots=True)
class _Row:
    """The state of a row with a grammar of its request, beside the matcher."""

    grammar: object  # the same for rows with the same grammar
    is_slow: bool
    num_bytes: int  # of memory that its matcher takes, as far as that is known
    said: list[int]  # the tokens that the matcher has read
    unread: list[int]  # those that it has to read before its next mask
    is_masked: bool = False  # it has made a mask since it has read the last token
    seconds: float = 0.0  # of processor time for slow masks
    read_seconds: float = 0.0  # of processor time in which the step's thread has read its tokens


class _JobMasks:
    """The masks of one step, while they are made."""

    def __init__(
        self,
        rows: "GrammarRows",
        places: list[int],
        jobs: dict[int, MaskJob],
        *,
        is_behind: bool,
    ) -> None:
        """`places`: of the M rows that need masks, among the S; `jobs` by row. The lane `is_behind`
        if it still has masks to make of an earlier step.
        """
        self._rows, self._places, self._jobs = rows, places, jobs
        self._seconds = 0.0 if is_behind else STEP_SECONDS

    def take(self, rows: IntArray, *, may_sit_out: bool) -> Masks:
        """Return those of the S `rows` of the step, once its forward pass is done. If they
        `may_sit_out`, some may be late; else the rows whose masks are not there after a second
        fail.
        """
        return self._rows.taken(rows, self._places, self._jobs, may_sit_out, self._seconds)


class _Apart:
    """The grammar of a row that is bound by more: its masks are not those of others."""


class GrammarRows(BoundRows):
    """The part of a batch that masks logits of rows, by a matcher each. What `begin` returns is
    taken before `advance`, `set` or `drop`.
    """

    rows: dict[int, Matcher]

    asked_by = "sampling_params.structured_outputs"

    def __init__(
        self, grammars: "GrammarCompiler | None", vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        super().__init__()
        self._grammars = grammars
        self._num_words = -(-vocab_size // 32)
        self._ahead: dict[int, int] = {}  # guesses that rows have gone ahead
        # By row, of a matcher that binds at times: whether the next tokens, this many, are free.
        self._is_free: dict[int, Callable[[int], bool]] = {}
        self._kept: dict[int, _Row] = {}
        self._jobs: dict[int, MaskJob] = {}  # by row, of those that sat the last step out
        self._slow: WeakSet[object] = WeakSet()  # grammars of which a row was slow
        only_eos = np.zeros(self._num_words * 32, dtype=np.bool_)
        only_eos[list(eos_token_ids)] = True
        self._only_eos: Words = np.packbits(only_eos, bitorder="little").view(np.int32)
        self._lanes = MaskLanes(self._only_eos)

    def set(self, row: int, request: NewRequestData) -> None:
        wanted = request.sampling_params.structured_outputs
        assert wanted is not None, "`asked_by`"
        assert self._grammars is not None, "the engine's door refuses what cannot be compiled"
        grammar, num_bytes, is_slow = self._grammars.traits(wanted)
        if self._num_bytes + num_bytes > MAX_ROW_BYTES:
            raise GrammarLimitError(GrammarLimitError.WORDS + TOO_LARGE)
        self.rows[row] = self._grammars.matcher(wanted)
        is_slow = is_slow or grammar in self._slow
        self._kept[row] = _Row(grammar, is_slow, num_bytes, [], [])
        said = request.token_ids[request.num_prompt_tokens :]
        for begin in range(0, len(said), PIECE):  # the rest is left once that has taken long
            self.advance(row, said[begin : begin + PIECE])

    def put(self, row: int, matcher: Matcher, is_free: Callable[[int], bool]) -> None:
        """Let `matcher` bind a row from now on, unless `is_free` of the number of next tokens."""
        if (kept := self._kept.get(row)) is not None:
            kept.grammar = _Apart()
            if kept.unread:
                self.rows[row].consume_tokens(kept.unread)
            kept.said, kept.unread = kept.said + kept.unread, []
        self.rows[row], self._is_free[row] = matcher, is_free

    def drop(self, row: int, *, is_finished: bool = False) -> None:
        super().drop(row, is_finished=is_finished)
        self._is_free.pop(row, None)
        self._kept.pop(row, None)
        self._jobs.pop(row, None)

    @property
    def _num_bytes(self) -> int:
        return sum(kept.num_bytes for kept in self._kept.values())

    def is_slow(self, row: int) -> bool:
        """Return whether calls for a row take long: then nothing is asked of it but its masks."""
        kept = self._kept.get(row)
        return kept is not None and kept.is_slow

    def begin(self, rows: IntArray, drafts: Mapping[int, Sequence[int]]) -> StepMasks | None:
        """Start the masks of the S `rows`; None if none of them has a grammar.

        A row stands there once, and once more for each of its `drafts`, one after the other.
        """
        if not self.rows:
            return None
        bound = [each for each in self.standing(rows, drafts) if each.is_bound]
        if not bound:
            return None
        jobs: dict[int, MaskJob] = {}
        is_behind = False
        same: dict[tuple[object, tuple[int, ...]], MaskJob] = {}
        quick: list[MaskJob] = []
        slow: list[MaskJob] = []
        for _, row, matcher, _ in bound:
            if row in jobs:
                continue
            guesses, kept = list(drafts.get(row, ())), self._kept.get(row)
            job, key = self._jobs.pop(row, None), None
            if job is not None and job.guesses[: len(guesses)] != guesses:
                wait_for([job], LAST_SECONDS)  # one thread at a time may use a matcher
                job = None
            is_behind |= job is not None and not job.is_done and not self.is_slow(row)
            if job is None and kept is not None and not guesses:
                if kept.is_slow or not kept.said:
                    key = kept.grammar, (*kept.said, *kept.unread)
                    job = same.get(key)
            if job is None:
                job = MaskJob(matcher, guesses, self._num_words)
                if kept is not None:
                    job.unread, job.is_masked = list(kept.unread), kept.is_masked
                (slow if self.is_slow(row) else quick).append(job)
                if key is not None:
                    same[key] = job
            jobs[row] = job
        self._lanes.start(quick, is_slow=False)
        self._lanes.start(slow, is_slow=True)
        return _JobMasks(self, [each.place for each in bound], jobs, is_behind=is_behind)

    def taken(
        self,
        rows: IntArray,
        places: list[int],
        jobs: dict[int, MaskJob],
        may_sit_out: bool,
        seconds: float,
    ) -> Masks:
        """Return the masks of a step of the S `rows`; see `_JobMasks.take`. Rows that need none
        wait for those of the others for `seconds` at most.
        """
        if may_sit_out:
            quick = [job for row, job in jobs.items() if not self.is_slow(row)]
            # A step of bound rows keeps no others waiting, and one that brings nothing takes time.
            if len(jobs) == len(rows):
                wait_for(quick or list(jobs.values()), STEP_SECONDS)
            else:
                wait_for(quick, seconds)
        else:
            wait_for(list(jobs.values()), LAST_SECONDS)
        words = np.empty((len(places), self._num_words), dtype=np.int32)
        late: list[int] = []
        index = 0
        # A row's places stand one behind the other, so counts alone say where each begins.
        for row, num_places in Counter(rows[places].tolist()).items():
            job = jobs[row]
            own = words[index : index + num_places]
            if job.is_done:
                self._take_job(row, job)
                own[:] = self._only_eos if row in self.errors else job.words[: len(own)]
            elif may_sit_out:
                self._jobs[row] = job
                late += range(index, index + len(own))
            else:
                self.errors.setdefault(row, GrammarLimitError.WORDS + NOT_IN_TIME)
                own[:] = self._only_eos
            index += len(own)
        self._bound_bytes()
        if not late:
            return Masks(np.array(places), words)
        kept = np.delete(np.arange(len(places)), late)
        return Masks(np.array(places)[kept], words[kept], np.array(places)[late])

    def _take_job(self, row: int, job: MaskJob) -> None:
        """Note what a job has brought for a row."""
        if isinstance(job.error, str):
            self._note(row, job.error)
        elif job.error is not None:
            self._fail(row, job.error)
        kept = self._kept.get(row)
        if kept is None:
            return
        is_own = job.matcher is self.rows.get(row)
        if is_own:  # what rows share counts once
            kept.said += job.unread
            kept.unread = kept.unread[len(job.unread) :]
            kept.is_masked = True
            kept.num_bytes += job.grown
            job.grown, job.unread = 0, []
        if job.seconds > SLOW_SECONDS:
            self._mark_slow(kept)
            if is_own:
                kept.seconds += job.seconds
        if kept.seconds > MAX_ROW_SECONDS:
            self._note(row, TOO_SLOW)

    def _mark_slow(self, kept: _Row) -> None:
        """Ask nothing but masks of a row, beside the step, nor of rows to come with its grammar."""
        kept.is_slow = True
        self._slow.add(kept.grammar)

    def _bound_bytes(self) -> None:
        """End the rows that take the most memory, if all take too much together."""
        excess = self._num_bytes - MAX_ROW_BYTES
        while excess > 0:
            living = [row for row in self._kept if row not in self.errors]
            if not living:
                return
            row = max(living, key=lambda row: self._kept[row].num_bytes)
            self._note(row, TOO_LARGE)
            excess -= self._kept[row].num_bytes

    def standing(
        self, rows: IntArray, drafts: Mapping[int, Sequence[int]] = NO_DRAFTS
    ) -> list[Standing]:
        """Return which of the S `rows` have a matcher: for `catch_up`, when their tokens
        are known.
        """
        if not self.rows:
            return []
        return [
            Standing(place, row, self.rows[row], self._is_bound(row, drafts.get(row, ())))
            for place, row in enumerate(rows.tolist())
            if row in self.rows
        ]

    def _is_bound(self, row: int, guesses: Sequence[int]) -> bool:
        is_free = self._is_free.get(row)
        return is_free is None or not is_free(1 + len(guesses))

    def catch_up(self, standing: Sequence[Standing], token_ids: Words) -> None:
        """Advance grammars by the sampled tokens [S], unless another request has the row by now."""
        for place, row, matcher, _ in standing:
            token_id = int(token_ids[place])
            if self.rows.get(row) is matcher and token_id >= 0:  # else the row has failed
                self.advance(row, [token_id])

    def append(
        self, rows: IntArray, token_ids: list[list[int]], drafts: Mapping[int, Sequence[int]]
    ) -> None:
        del drafts
        for row, own in zip(rows.tolist(), token_ids, strict=True):
            self.advance(row, own)

    def advance(self, row: int, token_ids: Sequence[int]) -> None:
        """Take in the next tokens of a row. A step that was planned ahead may bring too many."""
        matcher = self.rows.get(row)
        if matcher is None or not token_ids:
            return
        kept = self._kept.get(row)
        if kept is not None and (kept.unread or kept.is_slow):
            kept.unread.extend(token_ids)  # read before its next mask, beside the step
            return
        began = time.thread_time()
        try:
            if not matcher.is_stopped():
                matcher.consume_tokens(list(token_ids))
                self._check(row, matcher)
        except Exception as error:
            self._fail(row, error)
        if kept is not None:
            kept.said.extend(token_ids)
            kept.is_masked = False
            kept.read_seconds += time.thread_time() - began
            if kept.read_seconds > max(READ_SECONDS, TOKEN_SECONDS * len(kept.said)):
                self._mark_slow(kept)

    def guesses(self, row: int) -> list[int]:
        """Return the next tokens of a row, as far as its grammar leaves no choice of text."""
        matcher = self.rows.get(row)
        try:
            if matcher is None or self.is_slow(row) or matcher.is_stopped():
                return []
            token_ids, is_slow = timed(matcher.compute_ff_tokens)
            if is_slow and (kept := self._kept.get(row)) is not None:
                self._mark_slow(kept)
            self._check(row, matcher)
            return token_ids[:MAX_GUESSES]
        except Exception as error:
            self._fail(row, error)
            return []

    def masks(self, rows: IntArray) -> Masks | None:
        """Return the tokens that each of M `rows` may say next; None if none of them has a
        grammar.
        """
        standing = [each for each in self.standing(rows) if each.is_bound]
        if not standing:
            return None
        words = np.empty((len(standing), self._num_words), dtype=np.int32)
        for each, own in zip(standing, words, strict=True):
            if (error := fill(each.matcher, own, self._only_eos)) is not None:
                self._note(each.row, error)
        return Masks(np.array([each.place for each in standing]), words)

    def go_ahead(self, row: int, token_id: int) -> bool:
        """Take a guess as said until `come_back`; False if nothing can follow it."""
        matcher = self.rows.get(row)
        if matcher is None:
            return True
        if matcher.is_stopped() or not matcher.try_consume_tokens([token_id]):
            return False
        self._ahead[row] = self._ahead.get(row, 0) + 1
        return not matcher.is_stopped()

    def come_back(self) -> None:
        """Roll all matchers back to before the draft tokens."""
        for row, num_tokens in self._ahead.items():
            self.rows[row].rollback(num_tokens)
        self._ahead.clear()

    def _fail(self, row: int, error: BaseException) -> None:
        """A row cannot go on, for what its matcher has raised."""
        logger.error("a grammar could not be followed", exc_info=error)
        self.errors.setdefault(row, step_failed(error))

    def _check(self, row: int, matcher: Matcher) -> None:
        if matcher.is_error():
            self._note(row, matcher.get_error())

    def _note(self, row: int, reason: str) -> None:
        """A row cannot go on, for a reason that its client may read."""
        self.errors.setdefault(row, GrammarLimitError.WORDS + first_line(reason))

    def close(self) -> None:
        self._lanes.close()
