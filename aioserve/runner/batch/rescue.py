"""A step that raised is run again in halves, so that only the requests fail that make it raise.

What a step writes before it raises, the halves write again in the same places. So it is for models
whose layers keep K and V alone, in one process: a state that a step has moved on is not there any
more, and ranks wait for each other in the middle of a step. Knows steps and rows, nothing about how
a step is computed.
"""

import logging
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

import msgspec
import torch

from aioserve.errors import RunnerDeadError
from aioserve.outputs import ModelRunnerOutput
from aioserve.runner.batch.input_batch import SHARED, InputBatch
from aioserve.runner.interface import step_failed
from aioserve.scheduler.output import CachedRequestData, SchedulerOutput

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Parts of one step that may raise; what is left then fails, as where everything raises. One request
# is found among 256 in 8, two in 15 at most.
MAX_FAILURES = 32
# Steps that are run in parts of half its tokens, after one that did not fit into memory: one that
# fails first takes as long as two. Then a whole one is tried again. A guess.
NUM_SMALL_STEPS = 64
LOG_EVERY = 1.0  # seconds between two tracebacks in the log
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")
NO_MEMORY = "out of memory: the step that served this request does not fit, even alone"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory was lacking, by the words of torch's allocators where they have no
    type.
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


class StepRescue(Generic[T]):
    """Runs steps that a batch has been told of, whole or in parts."""

    def __init__(
        self,
        batch: InputBatch,
        run: Callable[[SchedulerOutput], T],
        *,
        is_end: Callable[[Exception], bool] = lambda error: False,
    ) -> None:
        """`run` computes the rows of a step, and changes nothing of `batch` if it raises. Unless
        `batch.may_lose`, all requests of a step fail with it. `is_end`: whether after an error no
        step can run any more. May be made when the first step has raised.
        """
        self._batch, self._run = batch, run
        self._is_end = is_end
        self._error: Exception | None = None  # the last
        self._num_failures = 0  # of the parts of this step
        self._most_tokens: int | None = None  # of a part, while memory is short
        self._num_small_steps = 0  # until a whole step is tried again
        self._logged_at = -LOG_EVERY

    def run(self, step: SchedulerOutput) -> list[T]:
        """Run a step, in parts if it must be. Returns what `run` makes of each part; requests that
        are in none are `lost` to the batch.
        """
        rows = list(step.num_scheduled_tokens)
        if self._batch.lost:
            rows = self._present(rows)
            step = self._part(step, rows)
            if not rows:
                return []
        if self._most_tokens is not None:
            self._num_small_steps -= 1
            if not self._num_small_steps:
                self._most_tokens = None
            elif self._is_large(step):
                return self._run_parts(step, sorted(rows, key=self._batch.num_computed))
        try:
            parts = [self._run(step)]
        except Exception as error:
            self.note_raised(error, step)
        else:
            if self._batch.lost:
                self._batch.lost.note_written(self._written(step))
            return parts
        return self.run_again(step)

    def note_raised(self, error: Exception, step: SchedulerOutput) -> None:
        """A whole step has raised. Raises `error` itself where no part of it is to be run again."""
        if isinstance(error, RunnerDeadError) or not self._batch.may_lose or self._is_end(error):
            raise error
        self._note(error, step)
        self._log(len(step.num_scheduled_tokens))

    def run_again(self, step: SchedulerOutput) -> list[T]:
        """Run a step that has raised, in parts; returns what `run` does."""
        rows = list(step.num_scheduled_tokens)
        return self._run_parts(step, sorted(rows, key=self._batch.num_computed))

    def _run_parts(self, step: SchedulerOutput, rows: Sequence[str]) -> list[T]:
        """Run the requests in the order of `rows`: one that shares blocks which another one fills
        comes after it, as it begins behind them.
        """
        parts: list[T] = []
        self._num_failures = 0
        waiting = _halves(rows) if len(rows) > 1 else [rows]  # it may have been for once
        while waiting:
            rows = self._present(waiting.pop())
            part = self._part(step, rows)
            if not rows:
                continue
            if self._is_large(part):
                waiting += _halves(rows)
            elif (done := self._try(part)) is not None:
                parts.append(done)
            elif len(rows) > 1:
                waiting += _halves(rows)
            else:
                parts += self._run_alone(step, rows[0])
        return parts

    def _run_alone(self, step: SchedulerOutput, request_id: str) -> list[T]:
        """Give up a request that makes a step raise; but for lack of memory its tokens are computed
        in pieces first.
        """
        error, count = self._error, step.num_scheduled_tokens[request_id]
        assert error is not None, "it has raised"
        parts: list[T] = []
        if not is_out_of_memory(error):
            self._give_up(request_id, step_failed(error))
            return parts
        begin = self._batch.num_computed(request_id)
        end, size = begin + count, count
        while begin < end:
            if size == 1 or not self._batch.may_cut(request_id, step):
                self._give_up(request_id, NO_MEMORY)
                return []
            size = -(-size // 2)
            while begin < end:
                self._batch.place(request_id, begin)
                piece = self._part(step, [request_id], min(size, end - begin))
                if (done := self._try(piece)) is None:
                    break
                parts.append(done)
                begin += size
        return parts

    def _try(self, part: SchedulerOutput) -> T | None:
        """Return what `run` makes of a part; None if it raises, or if enough of them have
        raised.
        """
        if self._num_failures == MAX_FAILURES:
            return None
        try:
            done = self._run(part)
        except Exception as error:
            if isinstance(error, RunnerDeadError) or self._is_end(error):
                raise
            self._note(error, part)
        else:
            self._batch.lost.note_written(self._written(part))
            return done
        self._num_failures += 1
        # Its frames hold what the part has computed, which takes memory.
        if self._error is not None:
            traceback.clear_frames(self._error.__traceback__)
        return None

    def _note(self, error: Exception, part: SchedulerOutput) -> None:
        """A part has raised: for lack of memory, the next ones are smaller at once."""
        self._error = error
        if is_out_of_memory(error) and len(part.num_scheduled_tokens) > 1:
            self._most_tokens = max(part.total_num_scheduled_tokens // 2, 1)
            self._num_small_steps = NUM_SMALL_STEPS

    def _is_large(self, part: SchedulerOutput) -> bool:
        """Return whether it would not fit, by what did not fit recently, and whether it can be
        halved.
        """
        most, num_rows = self._most_tokens, len(part.num_scheduled_tokens)
        return most is not None and num_rows > 1 and part.total_num_scheduled_tokens > most

    def _present(self, rows: Sequence[str]) -> list[str]:
        """Return requests that are not given up; one that reads what was not written is given up
        here.
        """
        lost, found = self._batch.lost, []
        for request_id in sorted(rows, key=self._batch.num_computed):
            if request_id in lost.why:
                continue
            if lost.are_unwritten(self._batch.blocks_read(request_id)):
                self._batch.lose(request_id, SHARED)
            else:
                found.append(request_id)
        return found

    def _give_up(self, request_id: str, why: str) -> None:
        logger.error("request %s fails: %s", request_id, why)
        self._batch.lose(request_id, why)

    def _log(self, num_rows: int) -> None:
        """Log the last error, once in a while: it may come with every step."""
        now = time.monotonic()
        if now - self._logged_at >= LOG_EVERY:
            self._logged_at = now
            what = "a step of %d requests raised, and is run again in parts"
            logger.error(what, num_rows, exc_info=self._error)

    def _written(self, step: SchedulerOutput) -> list[int]:
        counts = step.num_scheduled_tokens.items()
        return [block for key, count in counts for block in self._batch.blocks_begun(key, count)]

    @staticmethod
    def _part(
        step: SchedulerOutput, rows: Sequence[str], count: int | None = None
    ) -> SchedulerOutput:
        """Return some rows of a step; `count` tokens of the only one, if not all."""
        chosen = set(rows)
        counts = {key: count or step.num_scheduled_tokens[key] for key in rows}
        return msgspec.structs.replace(
            step,
            scheduled_new_reqs=[r for r in step.scheduled_new_reqs if r.request_id in chosen],
            scheduled_cached_reqs=CachedRequestData(  # the batch has heard of the rest
                [], [], _of(step.scheduled_cached_reqs.new_block_ids, chosen)
            ),
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            scheduled_spec_decode_tokens=_of(step.scheduled_spec_decode_tokens, chosen),
            parts={name: _of(part, chosen) for name, part in step.parts.items()},
        )


def merge_outputs(
    step: SchedulerOutput, outputs: Sequence[ModelRunnerOutput], lost: dict[str, str]
) -> ModelRunnerOutput:
    """Return the output of a step, from its parts; of the `lost` requests there is the reason
    alone.
    """
    req_ids = list(step.num_scheduled_tokens)
    tokens: dict[str, list[int]] = {}
    merged = ModelRunnerOutput(req_ids, [], {}, {}, {}, {}, {}, {}, [])
    for output in outputs:
        tokens.update(zip(output.req_ids, output.sampled_token_ids, strict=True))
        merged.logprobs.update(output.logprobs)
        merged.draft_token_ids.update(output.draft_token_ids)
        merged.failed.update(output.failed)
        merged.prompt_logprobs.update(output.prompt_logprobs)
        merged.pooled.update(output.pooled)
        merged.row_values.update(output.row_values)
        merged.sat_out.extend(output.sat_out)
    failed = {key: lost[key] for key in req_ids if key in lost}
    merged.failed.update(failed)
    merged.sampled_token_ids.extend([] if key in failed else tokens.get(key, []) for key in req_ids)
    return merged


V = TypeVar("V")


def _of(told: Mapping[str, V], chosen: set[str]) -> dict[str, V]:
    return {key: own for key, own in told.items() if key in chosen}


def _halves(rows: Sequence[str]) -> list[Sequence[str]]:
    """Return the second, then the first, as they are popped."""
    middle = len(rows) // 2
    return [rows[middle:], rows[:middle]]
