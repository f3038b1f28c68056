"""A runner made of dictionaries: its view of the batch, and what stands in which KV slot.

Beside its rows stand the states, windows and KV connector of toy models, each a part of its own.
What a request gets depends on all that it may see, so a wrong slot is found by the request that
reads it.
"""

from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aioserve.features.kv_connector import BlockStore, KVConnectorWorker, SlotGroup
from aioserve.kv_cache import BLOCKS, Ahead, KVConnectorMetadata, StatePool, WindowPool, WindowSpec
from aioserve.outputs import ModelRunnerOutput, TokenLogprobs, Vector
from aioserve.params import PoolingParams
from aioserve.request import ROW_VALUES, EncoderInput, invented
from aioserve.scheduler.output import NewRequestData, SchedulerOutput
from aioserve.testing.ledger import Drafter, Masked, Reply, next_of_reply
from aioserve.testing.violation import ContractViolation

#: Stands in a slot whose row failed, and in those that were computed of it.
SPOILT = -1
#: What is sampled of such slots: no reply and no made-up token is it.
WRONG_TOKEN = -1


def told_of(token_id: int) -> TokenLogprobs:
    """Return what a toy tells of how likely a token is: which token it is, asked or not."""
    return TokenLogprobs(0.0, 1, [token_id], [0.0])


class ToyRunner:
    """Executes steps in order. Raises `ContractViolation`."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        max_num_seqs: int | None = None,
        max_encoder_tokens: int | None = None,
        encoder_cache_tokens: int | None = None,
        drafter: Drafter | None = None,
        kv_worker: "ToyWorker | None" = None,
        num_state_slots: int | None = None,
        windows: WindowSpec | None = None,
    ) -> None:
        """Limits are checked where given. `drafter` proposes what comes after a sequence."""
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._max_encoder_tokens = max_encoder_tokens
        self._encoder_cache_tokens = encoder_cache_tokens
        self._drafter = drafter
        self._slots: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self._kv_worker = kv_worker
        self._states = None if num_state_slots is None else ToyStates(num_state_slots)
        self._windows = None if windows is None else ToyWindows(windows, block_size)
        if kv_worker is not None:
            kv_worker.pools[BLOCKS] = self._slots
            if self._states is not None:
                kv_worker.pools[StatePool.name] = self._states.contents
            if self._windows is not None:
                kv_worker.pools[WindowPool.name] = self._windows.slots
        self._writers: dict[tuple[int, int], str] = {}  # of a slot, for messages
        self._rows: dict[str, Row] = {}
        self.spoilt: set[str] = set()  # by the last step: requests computed on what is not there
        self._failed: frozenset[str] = frozenset()  # in the step that is computed
        self._encoder_outputs: dict[str, int] = {}  # sizes in tokens, by content

    @property
    def request_ids(self) -> set[str]:
        """Ids of the requests that have a row in the batch."""
        return set(self._rows)

    def execute(
        self,
        output: SchedulerOutput,
        namespaces: Mapping[str, Hashable] | None = None,
        replies: Mapping[str, Reply] | None = None,
        failed: Collection[str] = (),
    ) -> ModelRunnerOutput:
        """Return what the real runner does: drop, add, write keys and values, then read them.

        `namespaces` says, by request, what must match besides tokens for blocks to be shared;
        `replies`, what it is to get. The rows of the `failed` write nothing, and what rests on that
        gets wrong tokens: requests of which that is so are in `spoilt` then.
        """
        self.spoilt = set()
        self._failed = frozenset(failed)
        self._apply(output, namespaces or {}, replies or {})
        if output.kv_connector_metadata is not None and self._kv_worker is not None:
            self._kv_worker.transfer(output.kv_connector_metadata)
        self._encode(output)
        drafts = output.scheduled_spec_decode_tokens
        self._write(output)
        if self._states is not None:
            rows = {name: self._rows[name] for name in output.num_scheduled_tokens}
            self._states.run(
                output,
                {
                    name: (row.num_computed, row.keys_with(drafts.get(name, ())))
                    for name, row in rows.items()
                },
            )
        if self._windows is not None:
            by_row = {name: self._rows[name] for name in output.num_scheduled_tokens}
            self._windows.run(
                output,
                {
                    name: (row.num_computed, row.keys_with(drafts.get(name, ())))
                    for name, row in by_row.items()
                },
            )
        sampled = [
            self._read(output.step_id, request_id, num_tokens, drafts.get(request_id, []))
            for request_id, num_tokens in output.num_scheduled_tokens.items()
        ]
        if self._states is not None:
            for name in drafts:
                row = self._rows[name]
                self._states.take_back(name, row.keys_with(())[row.num_computed - 1])
        req_ids = list(output.num_scheduled_tokens)
        drafts = self._propose(req_ids, sampled, output.draft_lengths)
        wanted = output.parts.get(ROW_VALUES, {})
        return ModelRunnerOutput(
            req_ids,
            sampled,
            {n: [told_of(t) for t in own] for n, own in zip(req_ids, sampled, strict=True) if own},
            draft_token_ids=drafts,
            pooled=self._pool(output),
            failed=dict.fromkeys(self._failed, "planted"),
            row_values={
                name: invented(wanted[name], self._rows[name].token_ids, 0)
                for name, own in zip(req_ids, sampled, strict=True)
                if own and name in wanted
            },
        )

    def fail(
        self,
        output: SchedulerOutput,
        namespaces: Mapping[str, Hashable] | None = None,
        replies: Mapping[str, Reply] | None = None,
    ) -> None:
        """A step that fails before its forward pass: the batch is updated, nothing is written."""
        self._apply(output, namespaces or {}, replies or {})
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            self._rows[request_id].num_computed += num_tokens

    def _apply(
        self,
        output: SchedulerOutput,
        namespaces: Mapping[str, Hashable],
        replies: Mapping[str, Reply],
    ) -> None:
        for request_id in (*output.finished_req_ids, *output.preempted_req_ids):
            self._rows.pop(request_id, None)
            if self._states is not None:
                self._states.drop(request_id)
        if self._windows is not None:
            self._windows.apply(output)
        for content_hash in output.free_encoder_hashes:
            self._encoder_outputs.pop(content_hash, None)
        entered = set()
        for data in output.scheduled_new_reqs:
            name = data.request_id
            self._enter(output.step_id, data, namespaces.get(name), replies.get(name, ()))
            entered.add(data.request_id)
        cached = output.scheduled_cached_reqs
        for request_id, num_computed in zip(
            cached.req_ids, cached.num_computed_tokens, strict=True
        ):
            if request_id in entered:
                raise ContractViolation(
                    f"step {output.step_id}: {request_id} is served twice in one step"
                )
            entered.add(request_id)
            self._continue(
                output.step_id, request_id, num_computed, cached.new_block_ids.get(request_id, [])
            )
        if entered != set(output.num_scheduled_tokens):
            raise ContractViolation(
                f"step {output.step_id}: num_scheduled_tokens names "
                f"{sorted(output.num_scheduled_tokens)}, new and cached requests are "
                f"{sorted(entered)}"
            )
        if self._max_num_seqs is not None and len(self._rows) > self._max_num_seqs:
            raise ContractViolation(
                f"step {output.step_id}: {len(self._rows)} requests are in the runner's batch, "
                f"max_num_seqs is {self._max_num_seqs}"
            )

    def _enter(self, step_id: int, data: NewRequestData, namespace: Hashable, reply: Reply) -> None:
        if data.request_id in self._rows:
            raise ContractViolation(
                f"step {step_id}: {data.request_id} is new, but it is in the batch"
            )
        if isinstance(reply, Masked):  # by what the step says, as in the real one
            wanted = data.sampling_params.structured_outputs
            reply = () if wanted is None else Masked.by(wanted, reply.eos_token_ids)
        self._rows[data.request_id] = Row(
            list(data.token_ids),
            list(data.block_ids),
            data.num_computed_tokens,
            data.encoder_inputs,
            namespace,
            data.num_prompt_tokens,
            reply,
            data.pooling_params,
        )

    def _continue(
        self, step_id: int, request_id: str, num_computed: int, new_block_ids: list[int]
    ) -> None:
        row = self._rows.get(request_id)
        if row is None:
            raise ContractViolation(
                f"step {step_id}: {request_id} runs, but the runner was never given it"
            )
        if num_computed != row.num_computed:
            raise ContractViolation(
                f"step {step_id}: {request_id} continues after {num_computed} computed tokens, "
                f"but {row.num_computed} are computed"
            )
        row.block_ids += new_block_ids

    def _encode(self, output: SchedulerOutput) -> None:
        """Run the encoder inputs of the step; then every token has what it reads."""
        num_encoded = 0
        for request_id, indices in output.scheduled_encoder_inputs.items():
            if request_id not in output.num_scheduled_tokens:
                raise ContractViolation(
                    f"step {output.step_id}: encoder inputs of {request_id} run, but no token of it"
                )
            for index in indices:
                item = self._rows[request_id].encoder_inputs[index]
                self._encoder_outputs[item.content_hash] = item.size
                num_encoded += item.size
        if (ahead := Ahead.of(output.parts)) is not None:
            num_encoded += ahead.num_tokens
            if ahead.is_last:
                self._encoder_outputs[ahead.item.content_hash] = ahead.done
        self._check_encoder_limits(output.step_id, num_encoded)
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            row = self._rows[request_id]
            for item in row.encoder_inputs:
                is_read = item.position < row.num_computed + num_tokens
                if item.end > row.num_computed and is_read:
                    if item.content_hash not in self._encoder_outputs:
                        raise ContractViolation(
                            f"step {output.step_id}: {request_id} computes a token of the encoder "
                            f"input at {item.position}, whose output is not there"
                        )
                    if item.whole and row.num_computed + num_tokens < item.end:
                        raise ContractViolation(
                            f"step {output.step_id}: {request_id} computes a part of the encoder "
                            f"input at {item.position}, which runs whole"
                        )

    def _check_encoder_limits(self, step_id: int, num_encoded: int) -> None:
        limit = self._max_encoder_tokens
        if limit is not None and num_encoded > limit:
            raise ContractViolation(
                f"step {step_id}: {num_encoded} encoder tokens, max_encoder_tokens is {limit}"
            )
        room, num_kept = self._encoder_cache_tokens, sum(self._encoder_outputs.values())
        if room is not None and num_kept > room:
            raise ContractViolation(
                f"step {step_id}: encoder outputs of {num_kept} tokens are kept, "
                f"encoder_cache_tokens is {room}"
            )

    def _write(self, output: SchedulerOutput) -> None:
        owners: dict[int, str] = {}
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            row = self._rows[request_id]
            start, drafts = row.num_computed, output.scheduled_spec_decode_tokens.get(request_id)
            keys = row.keys_with(drafts or ())
            self._check_extent(output.step_id, request_id, num_tokens, drafts or ())
            for position in range(start, start + num_tokens):
                index, offset = divmod(position, self._block_size)
                block_id = row.block_ids[index]
                if owners.setdefault(block_id, request_id) != request_id:
                    raise ContractViolation(
                        f"step {output.step_id}: block {block_id} is written by "
                        f"{owners[block_id]} and {request_id}"
                    )
                self._slots[block_id][offset] = keys[position]
                self._writers[block_id, offset] = f"{request_id} wrote for position {position}"

    def _check_extent(
        self, step_id: int, request_id: str, num_tokens: int, drafts: Sequence[int]
    ) -> None:
        """The step computes known tokens and then all its drafts, and has blocks for them."""
        row = self._rows[request_id]
        end, num_known = row.num_computed + num_tokens, len(row.token_ids)
        proposals = row.proposed, row.proposed_before
        if not any(list(drafts) == own[: len(drafts)] for own in proposals):
            raise ContractViolation(
                f"step {step_id}: {request_id} verifies drafts {list(drafts)}, but {row.proposed} "
                f"were proposed, or a token before {row.proposed_before}"
            )
        if drafts and end != num_known + len(drafts):
            raise ContractViolation(
                f"step {step_id}: {request_id} computes up to position {end}, but its drafts end "
                f"at {num_known + len(drafts)}"
            )
        if end > num_known + len(drafts):
            raise ContractViolation(
                f"step {step_id}: {request_id} is to compute position {end - 1}, "
                f"but only {num_known} tokens are known"
            )
        if end > len(row.block_ids) * self._block_size:
            raise ContractViolation(
                f"step {step_id}: {request_id} has no block for position {end - 1}"
            )

    def _read(
        self, step_id: int, request_id: str, num_tokens: int, drafts: Sequence[int]
    ) -> list[int]:
        """Attend to everything before the end; sample if that is all that is known."""
        row = self._rows[request_id]
        row.num_computed += num_tokens
        keys = row.keys_with(drafts)[: row.num_computed]
        if request_id in self._failed or self._is_spoilt(row, row.num_computed):
            self._spoil(row, row.num_computed - num_tokens, row.num_computed)
            if request_id not in self._failed:
                self.spoilt.add(request_id)
            if row.num_computed < len(row.token_ids) or row.pooling is not None:
                return []
            row.token_ids.append(WRONG_TOKEN)
            row.num_computed = len(row.token_ids) - 1
            return [] if request_id in self._failed else [WRONG_TOKEN]
        self._check_content(step_id, request_id, keys)
        if row.pooling is not None:
            row.pooled += row.token_ids[row.num_computed - num_tokens : row.num_computed]
        if row.num_computed < len(row.token_ids) or row.pooling is not None:
            return []
        sampled = []
        for draft in (*drafts, None):
            sampled.append(next_of_reply(row.token_ids, row.num_prompt_tokens, row.reply)[0])
            row.token_ids.append(sampled[-1])
            if sampled[-1] != draft:
                break
        row.num_computed = len(row.token_ids) - 1  # what wrong drafts wrote is not counted
        return sampled

    def _is_spoilt(self, row: "Row", end: int) -> bool:
        """Return whether any of its first `end` positions was to be written by a row that
        failed.
        """
        size, slots = self._block_size, self._slots
        return any(slots[row.block_ids[i // size]][i % size] == SPOILT for i in range(end))

    def _spoil(self, row: "Row", begin: int, end: int) -> None:
        for position in range(begin, end):
            index, offset = divmod(position, self._block_size)
            self._slots[row.block_ids[index]][offset] = SPOILT

    def _pool(self, output: SchedulerOutput) -> dict[str, Vector]:
        """Of requests whose prompt is computed: the tokens whose states count, as a vector."""
        pooled: dict[str, Any] = {}
        for request_id in output.num_scheduled_tokens:
            row = self._rows[request_id]
            if row.pooling is not None and row.num_computed == len(row.token_ids):
                begin = 0 if row.pooling.pooling == "mean" else -1
                pooled[request_id] = row.pooled[begin:]
        return pooled

    def _check_content(self, step_id: int, request_id: str, keys: list[int]) -> None:
        size, row = self._block_size, self._rows[request_id]
        for index in range(-(-len(keys) // size)):
            expected = keys[index * size : (index + 1) * size]
            block_id = row.block_ids[index]
            found = self._slots[block_id][: len(expected)]
            if found != expected:
                offset = next(i for i, key in enumerate(expected) if found[i] != key)
                writer = self._writers.get((block_id, offset), "no step wrote")
                raise ContractViolation(
                    f"step {step_id}: {request_id} reads position {index * size + offset} in block "
                    f"{block_id} and finds what {writer}: not its own token, prefix or tenant"
                )

    def _propose(
        self, req_ids: list[str], sampled: list[list[int]], asked: Mapping[str, int]
    ) -> dict[str, list[int]]:
        """Draft tokens of the drafter, and of replies in which several come at once, as many as
        are asked for; those of a masked request fit the mask, and all of them come.
        """
        drafts: dict[str, list[int]] = {}
        for request_id, token_ids in zip(req_ids, sampled, strict=True):
            row = self._rows[request_id]
            if token_ids and row.reply:
                *together, _ = next_of_reply(row.token_ids, row.num_prompt_tokens, row.reply)
                if together:
                    drafts[request_id] = together
            elif token_ids and self._drafter is not None:
                drafts[request_id] = self._drafter(row.token_ids)
            if request_id in drafts and not isinstance(row.reply, Masked):
                drafts[request_id] = drafts[request_id][: asked.get(request_id)]
            row.proposed_before = row.proposed[1:]
            row.proposed = drafts.get(request_id, [])
        return drafts


# One request in the batch of a toy runner, and what its keys and values depend on. Knows tokens,
# encoder inputs and what keeps requests apart. Knows no slots and no steps.


@dataclass(slots=True)
class Row:
    """A row, as the steps have told it so far."""

    token_ids: list[int]
    block_ids: list[int]
    num_computed: int
    encoder_inputs: tuple[EncoderInput, ...]
    namespace: Hashable
    num_prompt_tokens: int
    reply: Reply
    pooling: PoolingParams | None
    pooled: list[int] = field(default_factory=list)  # the tokens whose states were pooled
    keys: list[int] = field(default_factory=list)  # of token_ids, on demand
    proposed: list[int] = field(default_factory=list)  # draft tokens, after its newest token
    # Those proposed before that token, which come after it: of a step that was planned ahead.
    proposed_before: list[int] = field(default_factory=list)

    def keys_with(self, drafts: Sequence[int]) -> list[int]:
        """Return what keys and values of each position depend on: namespace, tokens, encoder
        inputs.
        """
        self._extend(self.keys, self.token_ids)
        if not drafts:
            return self.keys
        keys = self.keys.copy()
        self._extend(keys, [*self.token_ids, *drafts])
        return keys

    def _extend(self, keys: list[int], token_ids: Sequence[int]) -> None:
        for position in range(len(keys), len(token_ids)):
            content = [
                (position - item.position, item.content_hash)
                for item in self.encoder_inputs
                if item.position <= position < item.end
            ]
            before: Hashable = keys[-1] if keys else self.namespace
            keys.append(hash((before, token_ids[position], *content)))


# The states of a toy model with states: what a slot holds depends on all tokens before it. Knows
# slots, and where a step begins and ends. Knows nothing about blocks or hashes.


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
        """Put back the state of the key `content`, since the last drafts were wrong."""
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


# The layers with a sliding window of a toy model: blocks of their own, read through the window.
# Knows positions and what it is told of blocks. Knows nothing about hashes or reservations.


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


# A KV connector made of dictionaries: slots of host memory, and a store that takes its time.
# Contents are what `ToyRunner` writes into its blocks. Knows no requests and checks nothing: what
# was copied to the wrong place is found by the request that reads it.


Content = list[int | None]


class ToyWorker(KVConnectorWorker):
    """Copies between what a `ToyRunner` has, pool by pool, and its slots."""

    block_bytes = 1
    _NAMES = (BLOCKS, WindowPool.name, StatePool.name)  # of pools that there may be

    def __init__(self, num_slots: int) -> None:
        """Make a worker with `num_slots` slots for each pool."""
        self.num_slots = num_slots
        self.pools: dict[str, list[Content]] = {}  # those of the runner, once there is one
        self.contents: list[Content] = [[] for _ in range(num_slots * len(self._NAMES))]

    @property
    def groups(self) -> list[SlotGroup]:
        return [SlotGroup(name, self.num_slots, self.block_bytes) for name in self._NAMES]

    def transfer(self, metadata: KVConnectorMetadata) -> None:
        for name, (saves, _) in metadata.by_pool.items():
            first = self._NAMES.index(name) * self.num_slots
            for block_id, slot in saves:
                self.contents[first + slot] = self.pools[name][block_id].copy()
        for name, (_, loads) in metadata.by_pool.items():
            first = self._NAMES.index(name) * self.num_slots
            for slot, block_id in loads:
                block = self.pools[name][block_id]  # empty: nothing was ever copied there
                block[:] = self.contents[first + slot] or [None] * len(block)


class ToyStore(BlockStore):
    """Answers when it is told to, in the order of the questions; reads may fail half-way."""

    def __init__(self, worker: ToyWorker) -> None:
        self._worker = worker
        self._contents: dict[bytes, Content] = {}
        self._pending: deque[Callable[[bool], None]] = deque()  # told whether it fails

    def __len__(self) -> int:
        """Return the number of questions that wait for an answer."""
        return len(self._pending)

    def answer(self, fails: bool = False) -> None:
        """Answer the oldest question that is open."""
        if self._pending:
            self._pending.popleft()(fails)

    def find(self, block_hashes: Sequence[bytes], on_found: Callable[[int], None]) -> None:
        def find(fails: bool) -> None:
            known = (i for i, h in enumerate(block_hashes) if h not in self._contents)
            on_found(0 if fails else next(known, len(block_hashes)))

        self._pending.append(find)

    def find_each(
        self, block_hashes: Sequence[bytes], on_found: Callable[[frozenset[bytes]], None]
    ) -> None:
        def find(fails: bool) -> None:
            on_found(frozenset(() if fails else (h for h in block_hashes if h in self._contents)))

        self._pending.append(find)

    def read(
        self, block_hashes: Sequence[bytes], slots: Sequence[int], on_read: Callable[[int], None]
    ) -> None:
        def read(fails: bool) -> None:
            num_read = len(slots) // 2 if fails else len(slots)
            for i, slot in enumerate(slots):  # what failed has overwritten its slot as well
                content = self._contents[block_hashes[i]] if i < num_read else []
                self._worker.contents[slot] = content.copy()
            on_read(num_read)

        self._pending.append(read)

    def write(
        self, block_hashes: Sequence[bytes], slots: Sequence[int], on_written: Callable[[], None]
    ) -> None:
        def write(fails: bool) -> None:
            for block_hash, slot in zip(block_hashes, slots, strict=True):
                if not fails:
                    self._contents[block_hash] = self._worker.contents[slot].copy()
            on_written()

        self._pending.append(write)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Callable[[], None]:
        return lambda: None  # no request waits so long: answers come, if with a failure

    def seconds_to_read(self, num_bytes: int) -> float:
        return 0.0

    async def change_weights(self, path: str) -> None:
        self._contents.clear()

    async def close(self) -> None:
        while self._pending:
            self.answer()
