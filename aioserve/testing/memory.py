"""A runner made of dictionaries: its view of the batch, and what stands in which KV slot.

Rebuilt from `SchedulerOutput` alone, as the real one is. A sampled token depends on every token
that is read back from memory, so a block that is shared, freed or overwritten wrongly changes
the output and is named.
"""

from collections.abc import Sequence
from zlib import crc32

from aioserve.outputs import ModelRunnerOutput
from aioserve.scheduler.output import SchedulerOutput

VOCAB_SIZE = 50


class ContractViolation(AssertionError):
    """A scheduler broke a rule; the message names the rule, the step and the request."""


def next_token(token_ids: Sequence[int]) -> int:
    """The token that follows: any fixed function of the whole sequence will do."""
    return crc32(repr(list(token_ids)).encode()) % VOCAB_SIZE


class _Row:
    def __init__(self, token_ids: list[int], block_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.block_ids = block_ids


class KVMemory:
    """Executes steps in order. Raises `ContractViolation`."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._slots: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self._rows: dict[str, _Row] = {}

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """What the real runner does: drop, add, write keys and values, then read them."""
        for request_id in (*output.finished_req_ids, *output.preempted_req_ids):
            self._rows.pop(request_id, None)
        computed = self._enter(output)
        if set(computed) != set(output.num_scheduled_tokens):
            raise ContractViolation(
                f"step {output.step_id}: num_scheduled_tokens names "
                f"{sorted(output.num_scheduled_tokens)}, new and cached requests are "
                f"{sorted(computed)}"
            )
        self._write(output, computed)
        sampled = [
            self._read(output.step_id, request_id, computed[request_id] + num_tokens)
            for request_id, num_tokens in output.num_scheduled_tokens.items()
        ]
        return ModelRunnerOutput(list(output.num_scheduled_tokens), sampled)

    def _enter(self, output: SchedulerOutput) -> dict[str, int]:
        """Update the rows; return computed tokens by request."""
        computed = {}
        for data in output.scheduled_new_reqs:
            if data.request_id in self._rows:
                raise ContractViolation(
                    f"step {output.step_id}: {data.request_id} is new, but it is in the batch"
                )
            self._rows[data.request_id] = _Row(list(data.token_ids), list(data.block_ids))
            computed[data.request_id] = data.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for request_id, num_computed in zip(
            cached.req_ids, cached.num_computed_tokens, strict=True
        ):
            if request_id not in self._rows:
                raise ContractViolation(
                    f"step {output.step_id}: {request_id} runs, but the runner was never given it"
                )
            self._rows[request_id].block_ids += cached.new_block_ids.get(request_id, [])
            computed[request_id] = num_computed
        return computed

    def _write(self, output: SchedulerOutput, computed: dict[str, int]) -> None:
        writers: dict[int, str] = {}
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            row, start = self._rows[request_id], computed[request_id]
            for position in range(start, start + num_tokens):
                if position >= len(row.token_ids):
                    raise ContractViolation(
                        f"step {output.step_id}: {request_id} is to compute position {position}, "
                        f"but only {len(row.token_ids)} tokens are known"
                    )
                index, offset = divmod(position, self._block_size)
                if index >= len(row.block_ids):
                    raise ContractViolation(
                        f"step {output.step_id}: {request_id} has no block for position {position}"
                    )
                block_id = row.block_ids[index]
                if writers.setdefault(block_id, request_id) != request_id:
                    raise ContractViolation(
                        f"step {output.step_id}: block {block_id} is written by "
                        f"{writers[block_id]} and {request_id}"
                    )
                self._slots[block_id][offset] = row.token_ids[position]

    def _read(self, step_id: int, request_id: str, end: int) -> list[int]:
        """Attend to everything before `end`; sample if that is all that is known."""
        row = self._rows[request_id]
        for position in range(end):
            index, offset = divmod(position, self._block_size)
            found = self._slots[row.block_ids[index]][offset]
            if found != row.token_ids[position]:
                raise ContractViolation(
                    f"step {step_id}: {request_id} reads token {found} at position {position} "
                    f"(block {row.block_ids[index]}), where {row.token_ids[position]} was computed"
                )
        if end < len(row.token_ids):
            return []
        token_id = next_token(row.token_ids)
        row.token_ids.append(token_id)
        return [token_id]
