"""The layers with a sliding window of a toy model: blocks of their own, read through the window.

Knows positions and what it is told of blocks. Knows nothing about hashes or reservations.
"""

from collections.abc import Sequence

from aioserve.kv_cache import WindowPool, WindowSpec
from aioserve.scheduler.output import SchedulerOutput
from aioserve.testing.violation import ContractViolation


class ToyWindows:
    """Tables as the runner is told of them, and what stands in the blocks. Raises
    `ContractViolation`.
    """

    def __init__(self, spec: WindowSpec, block_size: int) -> None:
        self._num_tokens, self._block_size = spec.num_tokens, block_size
        #: What stands in the blocks.
        self.slots: list[list[int | None]] = [[None] * block_size for _ in range(spec.num_blocks)]
        self._tables: dict[str, dict[int, int]] = {}  # by request: block ids by their place

    def apply(self, output: SchedulerOutput) -> None:
        """Take in which requests came or left, and which have more blocks."""
        for request_id in (*output.finished_req_ids, *output.preempted_req_ids):
            self._tables.pop(request_id, None)
        for data in output.scheduled_new_reqs:
            self._tables[data.request_id] = {}
        for request_id, blocks in output.parts.get(WindowPool.name, {}).items():
            places = range(blocks.first, blocks.first + len(blocks.block_ids))
            self._tables[request_id].update(zip(places, blocks.block_ids, strict=True))

    def run(self, output: SchedulerOutput, rows: dict[str, tuple[int, Sequence[int]]]) -> None:
        """Run a step; `rows` has each request's first position, and the keys of all its tokens: all
        write, then all read.
        """
        writers: dict[int, str] = {}
        for request_id, (begin, keys) in rows.items():
            for position in range(begin, begin + output.num_scheduled_tokens[request_id]):
                block_id = self._block(output, request_id, position)
                if writers.setdefault(block_id, request_id) != request_id:
                    raise ContractViolation(
                        f"step {output.step_id}: window block {block_id} is written by "
                        f"{writers[block_id]} and {request_id}"
                    )
                self.slots[block_id][position % self._block_size] = keys[position]
        for request_id, (begin, keys) in rows.items():
            end = begin + output.num_scheduled_tokens[request_id]
            for position in range(max(begin - self._num_tokens + 1, 0), end):
                block_id = self._block(output, request_id, position)
                if self.slots[block_id][position % self._block_size] != keys[position]:
                    raise ContractViolation(
                        f"step {output.step_id}: {request_id}, behind {begin} tokens, reads "
                        f"position {position} of its window in block {block_id} and finds another's"
                    )

    def _block(self, output: SchedulerOutput, request_id: str, position: int) -> int:
        found = self._tables[request_id].get(position // self._block_size)
        if found is None:
            raise ContractViolation(
                f"step {output.step_id}: {request_id} has no window block for position {position}"
            )
        return found
