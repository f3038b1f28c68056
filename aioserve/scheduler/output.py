"""What one step runs: the only thing that travels from the scheduler to the runner.

Full data once for a request that enters the batch; afterwards only what changed. `StepFeatures`
are the counts of tokens and rows by which models of step time say how long a step takes.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from aioserve.params import PoolingParams, SamplingParams
from aioserve.request import EncoderInput, Request

if TYPE_CHECKING:
    from aioserve.kv_cache import KVConnectorMetadata

_NOTHING: Mapping[str, Any] = {}


class NewRequestData(msgspec.Struct, frozen=True, gc=False):
    """A request that enters the batch: for the first time, or after a preemption or a pause."""

    request_id: str
    token_ids: list[int]  # all known tokens: the prompt, and the output if it ran before
    num_prompt_tokens: int
    sampling_params: SamplingParams
    stop_token_ids: frozenset[int]  # EOS included unless ignored; masked until min_tokens
    block_ids: list[int]
    num_computed_tokens: int  # found in blocks of the cache; the step computes what follows
    encoder_inputs: tuple[EncoderInput, ...] = ()
    pooling_params: PoolingParams | None = None  # given: a vector of the prompt, and no token
    cache_salt: str = ""  # nothing of it is used for requests with another salt
    adapter_id: str = ""  # what it is computed with besides the model

    @classmethod
    def of(cls, request: Request, num_tokens: int) -> "NewRequestData":
        """Data of a request that gets `num_tokens` tokens in its first step."""
        return cls(
            request_id=request.request_id,
            token_ids=list(request.token_ids),  # the request's own list grows on the loop
            num_prompt_tokens=request.num_prompt_tokens,
            sampling_params=request.sampling_params,
            stop_token_ids=request.stop_token_ids,
            block_ids=list(request.block_ids),
            num_computed_tokens=request.num_computed_tokens - num_tokens,
            encoder_inputs=request.encoder_inputs,
            pooling_params=request.pooling_params,
            cache_salt=request.cache_salt,
            adapter_id=request.adapter_id,
        )


class CachedRequestData(msgspec.Struct, frozen=True, gc=False):
    """The requests of this step that are in the batch already, as columns."""

    req_ids: list[str]
    num_computed_tokens: list[int]  # before this step
    new_block_ids: dict[str, list[int]]  # appended to what the runner has; absent = none


class SchedulerOutput(msgspec.Struct, frozen=True, gc=False):
    """One forward pass: `{request_id: num_tokens}` and what the runner needs for it.

    The runner first drops `finished_req_ids` and `preempted_req_ids` from its batch, then adds
    `scheduled_new_reqs`, then runs the rows in the order of `num_scheduled_tokens`. Steps are
    executed in the order in which they were scheduled. Within a layer, keys and values of all
    rows are written before any row attends: rows may share blocks that this very step fills.
    Its lists and dicts never change: steps that run the same rows share them. After steps that
    failed, the runner is told once more which requests left; it may not know these ids any more.
    """

    step_id: int
    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]  # new and cached, in batch order
    total_num_scheduled_tokens: int
    preempted_req_ids: list[str]  # they leave the batch, and may come back as new
    finished_req_ids: list[str]
    #: Draft tokens to verify, by request: the last of its tokens in this step, not known tokens.
    scheduled_spec_decode_tokens: dict[str, list[int]] = {}
    #: By the name of a `Resource`: what its plan tells the runner. Of a resource that has nothing
    #: to tell there is none. What a policy tells the runner is a part as well.
    parts: dict[str, Mapping[str, Any]] = {}
    paused_req_ids: list[str] = []  # of the preempted, those that keep their blocks: paused ones

    @property
    def scheduled_encoder_inputs(self) -> dict[str, list[int]]:
        """Encoder inputs to run before this step, by request: indices into `encoder_inputs`."""
        found: dict[str, list[int]] = self.parts.get("encoder", _NOTHING).get("inputs", {})
        return found

    @property
    def free_encoder_hashes(self) -> list[str]:
        """The encoder outputs that the runner may drop."""
        found: list[str] = self.parts.get("encoder", _NOTHING).get("free", [])
        return found

    @property
    def draft_lengths(self) -> Mapping[str, int]:
        """How many draft tokens to guess after the step, by request, where the policy says it."""
        return self.parts.get("draft_lengths", _NOTHING)

    @property
    def kv_connector_metadata(self) -> "KVConnectorMetadata | None":
        """The blocks to copy before the step; None: there is nothing to copy."""
        if not (part := self.parts.get("loads")):  # of some rows of a step alone, it is empty
            return None
        from aioserve.kv_cache import KVConnectorMetadata

        return KVConnectorMetadata(**part)

    @property
    def highest_new_block(self) -> int:
        """The highest id of the KV blocks that requests got for this or a later step; -1: none."""
        if not (self.scheduled_new_reqs or self.scheduled_cached_reqs.new_block_ids):
            return -1  # most steps
        given = [request.block_ids for request in self.scheduled_new_reqs]
        given += self.scheduled_cached_reqs.new_block_ids.values()
        return max(itertools.chain.from_iterable(given), default=-1)


class OpenStep:
    """The part of a step under construction that is needed if it is never sent."""

    __slots__ = ("preempted_req_ids", "step_id", "tokens")

    step_id: int
    tokens: dict[Request, int]  # requests served, with how many tokens, in order
    preempted_req_ids: list[str]  # those that the runner has heard of


class StepFeatures(NamedTuple):
    """Token and row counts of one step."""

    num_prefill_tokens: int  # of rows with more than one token
    num_decodes: int  # rows with one token
    num_context_tokens: int  # sum over rows: keys and values to read
    num_query_context: int  # sum over prefill rows of what each token sees: the attention work
    num_prefills: int = 0  # rows with more than one token

    @classmethod
    def of(
        cls, num_decodes: int, num_context_tokens: int, prefills: Sequence[tuple[int, int]]
    ) -> "StepFeatures":
        """`prefills`: of each row with more than one token, how many, and its length with them."""
        num_prefill_tokens = num_query_context = 0
        for num_tokens, end in prefills:
            num_prefill_tokens += num_tokens
            num_query_context += num_tokens * (2 * end - num_tokens + 1) // 2
        return cls(
            num_prefill_tokens, num_decodes, num_context_tokens, num_query_context, len(prefills)
        )

    def with_drafts(self, num_rows: int, num_drafts: int) -> "StepFeatures":
        """Add `num_rows` rows that verify `num_drafts` draft tokens: each row counts as a decode,
        each draft token as a prompt token, no row as a prefill.
        """
        return self._replace(
            num_prefill_tokens=self.num_prefill_tokens + num_drafts,
            num_decodes=self.num_decodes + num_rows,
        )


def count_tokens(output: SchedulerOutput) -> tuple[int, int, int]:
    """Prefill tokens, decodes and context tokens of a planned step: what is quick to count."""
    cached, total = output.scheduled_cached_reqs, output.total_num_scheduled_tokens
    num_context = sum(cached.num_computed_tokens) + total
    if total == len(cached.req_ids):  # nothing but decodes: most steps are
        return 0, total, num_context
    num_context += sum([data.num_computed_tokens for data in output.scheduled_new_reqs])
    num_decodes = list(output.num_scheduled_tokens.values()).count(1)
    return total - num_decodes, num_decodes, num_context


def step_content(
    output: SchedulerOutput,
) -> tuple[StepFeatures, Sequence[tuple[int, int]]]:
    """Return the features of a planned step, and of each row that prefills, how many tokens it gets
    and its length with them.
    """
    num_prefill_tokens, num_decodes, num_context = count_tokens(output)
    if not num_prefill_tokens:
        return StepFeatures(0, num_decodes, num_context, 0), ()
    cached = output.scheduled_cached_reqs
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    for data in output.scheduled_new_reqs:
        computed[data.request_id] = data.num_computed_tokens
    drafts = output.scheduled_spec_decode_tokens
    prefills = [
        (n, computed[r] + n)
        for r, n in output.num_scheduled_tokens.items()
        if n > 1 and r not in drafts
    ]
    found = StepFeatures.of(num_decodes, num_context, prefills)
    return found.with_drafts(len(drafts), sum(map(len, drafts.values()))), prefills


def step_features(output: SchedulerOutput) -> StepFeatures:
    """Return the features of a planned step."""
    return step_content(output)[0]
