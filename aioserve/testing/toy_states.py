"""The states of a toy model with states: what a slot holds depends on all tokens before it.

Knows slots, and where a step begins and ends. Knows nothing about blocks or hashes.
"""

from collections.abc import Sequence

from aioserve.kv_cache import StatePool
from aioserve.scheduler.output import SchedulerOutput
from aioserve.testing.violation import ContractViolation


class ToyStates:
    """Slots as the runner is told of them. Raises `ContractViolation`."""

    def __init__(self, num_slots: int) -> None:
        #: Of each slot, the key of the last token in its state.
        self.contents: list[list[int | None]] = [[None] for _ in range(num_slots)]
        self._own: dict[str, int] = {}  # by request

    def drop(self, request_id: str) -> None:
        """Forget a request that left the batch."""
        self._own.pop(request_id, None)

    def take_back(self, request_id: str, content: int) -> None:
        """Its last drafts were wrong: the state is that behind the key `content`."""
        self.contents[self._own[request_id]][0] = content

    def run(self, output: SchedulerOutput, rows: dict[str, tuple[int, Sequence[int]]]) -> None:
        """Run a step; `rows` has each request's first position, and the keys of all its tokens."""
        where, told = f"step {output.step_id}", output.parts.get(StatePool.name, {})
        if strangers := told.keys() - rows.keys():
            raise ContractViolation(f"{where}: states of {sorted(strangers)}, which do not run")
        read: dict[int, str] = {}
        written: dict[int, tuple[str, int | None]] = {}
        for request_id, (begin, keys) in rows.items():
            moves = told.get(request_id)
            if moves is None and request_id not in self._own:
                raise ContractViolation(f"{where}: {request_id} runs without a slot for its state")
            slot = self._own[request_id] if moves is None else moves.slot
            source = slot if moves is None else moves.source
            found = None if source < 0 else self.contents[source][0]
            if found != (keys[begin - 1] if begin else None) or (source >= 0 and not begin):
                raise ContractViolation(
                    f"{where}: {request_id} begins behind {begin} tokens with a state in slot "
                    f"{source} that is not theirs"
                )
            if source != slot:
                read[source] = request_id
            end = begin + output.num_scheduled_tokens[request_id]
            for position, target in [*([] if moves is None else moves.snapshots), (end, slot)]:
                if not begin < position <= end:
                    raise ContractViolation(
                        f"{where}: a snapshot of {request_id} behind {position} tokens, but the "
                        f"step computes {begin} to {end}"
                    )
                if target in written or (slot != target and target in self._own.values()):
                    raise ContractViolation(
                        f"{where}: slot {target} is to hold a state of {request_id}, and another"
                    )
                written[target] = request_id, keys[position - 1]
            self._own[request_id] = slot
        if shared := {slot for slot, (name, _) in written.items() if read.get(slot, name) != name}:
            raise ContractViolation(f"{where}: slots {sorted(shared)} are read and written")
        if len(set(self._own.values())) < len(self._own):
            raise ContractViolation(f"{where}: two requests have one slot for their states")
        for slot, (_, content) in written.items():
            self.contents[slot][0] = content
