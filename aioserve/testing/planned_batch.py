"""The batch as the scheduler has told it so far, steps in flight included: rows and their blocks.

Knows limits, rows and block tables. Knows nothing about what is computed or sampled.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from aioserve.config import SchedulerConfig
from aioserve.request import Request, RequestStatus
from aioserve.scheduler.output import NewRequestData, SchedulerOutput
from aioserve.testing.ledger import Ledger, Life
from aioserve.testing.violation import ContractViolation


@dataclass(slots=True, eq=False)
class Row:
    """One request in the batch, from the step in which it enters."""

    life: Life
    block_ids: list[int]
    is_preempted: bool = False  # its blocks went back at once
    num_computed: int = 0  # tokens, drafts included


class PlannedBatch:
    """Takes in steps as they are planned. Raises `ContractViolation`."""

    def __init__(
        self, config: SchedulerConfig, ledger: Ledger, num_blocks: int, block_size: int, budget: int
    ) -> None:
        """`budget` is the most tokens of a step."""
        self.rows: dict[str, Row] = {}
        self.paused: dict[str, Row] = {}  # not in the batch, but with all their blocks
        self.prefetched: dict[str, Row] = {}  # the same; no step tells of these blocks
        self._config = config
        self._ledger = ledger
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._budget = budget

    def apply(self, output: SchedulerOutput, in_flight: Collection[Row]) -> list[Row]:
        """Check a step and enter it; `in_flight` are rows of steps that are not back.

        Returns the rows that it runs, in order.
        """
        self._check_sum(output)
        where = f"step {output.step_id}"
        for request_id in output.finished_req_ids:
            self._ledger.tell(request_id, where)
            self.rows.pop(request_id, None)
            self.paused.pop(request_id, None)
        self._take_out(output, where)
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            self._check_request(request_id, num_tokens, where)
        self._check_columns(output, where)
        self._check_owners(output, in_flight, where)
        self._enter(output, where)
        self._check_lengths(output, where)
        return [self.rows[request_id] for request_id in output.num_scheduled_tokens]

    def discard(self, output: SchedulerOutput) -> None:
        """This step was planned, but will not run; the requests that it served have ended."""
        self._take_out(output, f"step {output.step_id}")  # the next step tells the runner
        for request_id, block_ids in output.scheduled_cached_reqs.new_block_ids.items():
            self.rows[request_id].block_ids += block_ids  # held while a step before it has them

    def give_up(self) -> None:
        """Note a step given up half-way: each block belongs to the request that holds it now."""
        for request_id, row in [*self.rows.items(), *self.paused.items()]:
            if row.life.is_alive:
                row.block_ids[:] = row.life.request.block_ids
                if not row.block_ids:
                    self.preempt([request_id])

    def lose(self) -> set[Life]:
        """A request has failed: those that rest on its work have lost their rows and blocks."""
        rows = {**self.rows, **self.paused}
        there = [(name, row.life) for name, row in rows.items() if row.life.is_alive]
        lost = {n: life for n, life in there if life.request.status is RequestStatus.PREEMPTED}
        self.preempt(lost)
        return set(lost.values())

    def preempt(self, request_ids: Iterable[str]) -> None:
        """Note that requests have lost their rows and blocks."""
        for request_id in request_ids:
            for rows in (self.rows, self.paused, self.prefetched):
                if (row := rows.pop(request_id, None)) is not None:
                    row.is_preempted = True

    def note_prefetched(self, requests: Iterable[Request]) -> None:
        """Note which requests hold blocks that a connector has loaded, as the scheduler says. What
        the blocks contain is seen when the requests run.
        """
        self.prefetched = {
            request.request_id: Row(
                self._ledger.lives[request.request_id],
                request.block_ids.copy(),
                num_computed=request.num_computed_tokens,
            )
            for request in requests
        }

    def _take_out(self, output: SchedulerOutput, where: str) -> None:
        """Requests leave the batch: those that are paused keep their blocks."""
        paused = set(output.paused_req_ids)
        if strangers := paused - set(output.preempted_req_ids):
            raise ContractViolation(
                f"{where}: {sorted(strangers)} are paused, and stay in the batch"
            )
        for request_id in paused & self.rows.keys():
            self.paused[request_id] = self.rows.pop(request_id)
        self.preempt(name for name in output.preempted_req_ids if name not in paused)

    def holders(self, in_flight: Collection[Row]) -> list[Row]:
        """Return requests that hold blocks: unfinished ones, and ended ones that a step still
        has.
        """
        rows = (*self.rows.values(), *self.paused.values(), *self.prefetched.values())
        holders = [row for row in rows if row.life.is_alive]
        holders += {row for row in in_flight if not (row.life.is_alive or row.is_preempted)}
        return holders

    def must_tell(self) -> list[str]:
        """Return requests that have ended and are still in the runner's batch."""
        return [request_id for request_id, row in self.rows.items() if not row.life.is_alive]

    def _check_sum(self, output: SchedulerOutput) -> None:
        where, scheduled = f"step {output.step_id}", output.num_scheduled_tokens
        total = output.total_num_scheduled_tokens
        if total != sum(scheduled.values()):
            raise ContractViolation(
                f"{where}: total_num_scheduled_tokens is {total}, the sum is "
                f"{sum(scheduled.values())}"
            )
        if total > self._budget:
            raise ContractViolation(
                f"{where}: {total} tokens are more than max_num_batched_tokens ({self._budget})"
            )
        if len(scheduled) > self._config.max_num_seqs:
            raise ContractViolation(
                f"{where}: {len(scheduled)} requests are more than max_num_seqs "
                f"({self._config.max_num_seqs})"
            )

        lives = [life for name in scheduled if (life := self._ledger.lives.get(name))]
        adapters = {life.request.adapter_id for life in lives} - {""}
        if len(adapters) > self._config.max_loras:
            raise ContractViolation(
                f"{where}: {len(adapters)} adapters are more than max_loras "
                f"({self._config.max_loras})"
            )

    def _check_request(self, request_id: str, num_tokens: int, where: str) -> None:
        life = self._ledger.lives.get(request_id)
        if life is None or not life.is_alive:
            state = "unknown" if life is None else "has ended"
            raise ContractViolation(f"{where}: {request_id} is scheduled, but {state}")
        if num_tokens < 1:
            raise ContractViolation(f"{where}: {request_id} runs with {num_tokens} tokens")
        limit = self._config.long_prefill_token_threshold
        if limit is not None and num_tokens > limit:
            raise ContractViolation(
                f"{where}: {request_id} runs with {num_tokens} tokens, "
                f"long_prefill_token_threshold is {limit}"
            )

    def _check_columns(self, output: SchedulerOutput, where: str) -> None:
        """Check that each request appears once, and blocks only with their request."""
        new = [data.request_id for data in output.scheduled_new_reqs]
        cached = output.scheduled_cached_reqs
        for request_id, count in Counter([*new, *cached.req_ids]).items():
            if count > 1:
                raise ContractViolation(f"{where}: {request_id} is served twice in one step")
        for request_id in new:
            if request_id in self.rows:
                raise ContractViolation(f"{where}: {request_id} is new, but it is in the batch")
        if strangers := cached.new_block_ids.keys() - set(cached.req_ids):
            raise ContractViolation(
                f"{where}: {sorted(strangers)} get new blocks, but do not continue"
            )
        if strangers := output.scheduled_spec_decode_tokens.keys() - set(new + cached.req_ids):
            raise ContractViolation(f"{where}: {sorted(strangers)} verify drafts, but do not run")

    def _check_owners(
        self, output: SchedulerOutput, in_flight: Collection[Row], where: str
    ) -> None:
        """Check that no held block is handed out; an ended request may still write its own."""
        owners = {
            block_id: row.life for row in self.holders(in_flight) for block_id in row.block_ids
        }
        for request_id, block_id in self._handed_out(output):
            if not 0 <= block_id < self._num_blocks:
                raise ContractViolation(
                    f"{where}: {request_id} gets block {block_id} of {self._num_blocks}"
                )
            owner = owners.get(block_id)
            if owner is not None:
                doing = "holds" if owner.is_alive else "has ended, but a step in flight writes"
                raise ContractViolation(
                    f"{where}: {request_id} gets block {block_id}, which {owner.request_id} {doing}"
                )
            owners[block_id] = self._ledger.lives[request_id]

    def _handed_out(self, output: SchedulerOutput) -> Iterator[tuple[str, int]]:
        for request_id, block_ids in output.scheduled_cached_reqs.new_block_ids.items():
            for block_id in block_ids:
                yield request_id, block_id
        for data in output.scheduled_new_reqs:
            num_shared = data.num_computed_tokens // self._block_size
            row = self.paused.get(data.request_id) or self.prefetched.get(data.request_id)
            if row is not None:
                num_shared = len(row.block_ids)
            for block_id in data.block_ids[num_shared:]:
                yield data.request_id, block_id

    def _enter(self, output: SchedulerOutput, where: str) -> None:
        for data in output.scheduled_new_reqs:
            if data.request_id not in output.num_scheduled_tokens:
                raise ContractViolation(f"{where}: {data.request_id} is new, but runs no token")
            life = self._ledger.lives[data.request_id]
            self._check_new(data, life, where)
            self._check_resumed(data, where)
            self.rows[data.request_id] = Row(life, list(data.block_ids))
            self.rows[data.request_id].num_computed = data.num_computed_tokens
            life.was_scheduled = True
        cached = output.scheduled_cached_reqs
        for request_id in (*cached.req_ids, *output.num_scheduled_tokens):
            if request_id not in self.rows:
                raise ContractViolation(
                    f"{where}: {request_id} runs, but the runner was never given it"
                )
        for request_id, block_ids in cached.new_block_ids.items():
            self.rows[request_id].block_ids += block_ids
        for request_id, num_computed in zip(
            cached.req_ids, cached.num_computed_tokens, strict=True
        ):
            self.rows[request_id].num_computed = num_computed
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            self.rows[request_id].num_computed += num_tokens

    def _check_new(self, data: NewRequestData, life: Life, where: str) -> None:
        request = life.request
        if data.token_ids != life.prompt + life.tokens:
            raise ContractViolation(
                f"{where}: {data.request_id} enters with tokens that are not its prompt and output"
            )
        if data.num_prompt_tokens != len(life.prompt):
            raise ContractViolation(
                f"{where}: {data.request_id} enters with {data.num_prompt_tokens} prompt tokens, "
                f"it has {len(life.prompt)}"
            )
        if data.num_computed_tokens >= len(data.token_ids):
            raise ContractViolation(
                f"{where}: {data.request_id} enters with nothing left to compute and sample from"
            )
        names = (
            *("sampling_params", "pooling_params", "stop_token_ids", "encoder_inputs"),
            *("cache_salt", "adapter_id"),
        )
        if any(getattr(data, name) != getattr(request, name) for name in names):
            raise ContractViolation(
                f"{where}: {data.request_id} enters with other parameters than it came with"
            )

    def _check_resumed(self, data: NewRequestData, where: str) -> None:
        """Check that a request that was paused goes on where it stopped, with the same blocks."""
        prefetched = self.prefetched.pop(data.request_id, None)
        row = self.paused.pop(data.request_id, prefetched)
        if row is None:
            return
        if data.block_ids[: len(row.block_ids)] != row.block_ids:
            raise ContractViolation(
                f"{where}: {data.request_id} comes back from a pause with blocks {data.block_ids}, "
                f"it had {row.block_ids}"
            )
        life = row.life  # what wrong drafts wrote does not count
        expected = min(row.num_computed, len(life.prompt) + len(life.tokens) - 1)
        if data.num_computed_tokens != expected:
            raise ContractViolation(
                f"{where}: {data.request_id} comes back from a pause behind "
                f"{data.num_computed_tokens} computed tokens, it had {expected}"
            )

    def _check_lengths(self, output: SchedulerOutput, where: str) -> None:
        """Check that the last token before the length limit is not computed: it is never read."""
        computed = {d.request_id: d.num_computed_tokens for d in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            end = computed.get(request_id, 0) + num_tokens
            limit = self._ledger.lives[request_id].max_total_tokens
            if end >= limit:
                raise ContractViolation(
                    f"{where}: {request_id} computes {end} tokens, but ends at its length limit of "
                    f"{limit}, whose last is never computed"
                )
