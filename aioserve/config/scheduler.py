"""Settings of the scheduler: the policy, its limits and its logs."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from aioserve.config.section import DEFAULT_STEP_BUDGET, PositiveFloat, PositiveInt, Section, doc


class SchedulerConfig(Section, frozen=True, kw_only=True):
    """Limits that hold under every policy, the choice of the policy, and what is logged."""

    policy: Annotated[
        str, doc("scheduling policy: an installed name, package.module:Class, or file.py:Class")
    ] = "chunked_prefill"
    options: Annotated[
        dict[str, Any], doc("options of the policy, as a mapping (YAML or --set)")
    ] = msgspec.field(default_factory=dict)
    max_num_seqs: Annotated[PositiveInt, doc("batch size: most requests in one step")] = 256
    max_loras: Annotated[
        PositiveInt, doc("most LoRA adapters in use by running requests at a time")
    ] = 8
    max_num_batched_tokens: Annotated[
        PositiveInt | None,
        doc(
            f"token budget: most tokens in one step (default: {DEFAULT_STEP_BUDGET}, or "
            "max_model_len if larger)"
        ),
    ] = None
    long_prefill_token_threshold: Annotated[
        PositiveInt | None,
        doc("prefill chunk limit: most tokens of one prompt in one step (default: no limit)"),
    ] = None
    victim: Annotated[
        Literal[
            "policy", "newest", "lowest_priority", "least_computed", "most_remaining", "least_lost"
        ],
        doc(
            "preemption: which request loses its KV blocks when they run out; policy: the last one "
            "in the policy's order"
        ),
    ] = "policy"
    max_leased_share: Annotated[
        float, doc("share of the KV cache that prefixes pinned by a policy may hold", ge=0, le=1)
    ] = 0.5
    max_waiting_requests: Annotated[
        PositiveInt, doc("queue limit in requests; beyond it requests are refused with 429")
    ] = 10_000
    max_waiting_tokens: Annotated[
        PositiveInt | None,
        doc(
            "queue limit in prompt tokens; beyond it requests are refused with 429 (default: none)"
        ),
    ] = None
    queue_timeout: Annotated[
        PositiveFloat | None,
        doc("seconds after which a never-scheduled request ends with 'timeout' (default: never)"),
    ] = None
    stall_timeout: Annotated[
        PositiveFloat,
        doc("seconds for which a policy may schedule nothing while requests wait; then these fail"),
    ] = 30.0
    max_encoder_tokens: Annotated[
        PositiveInt, doc("encoder token budget: most encoder tokens (images, audio) in one step")
    ] = 16_384  # what Qwen2.5-VL makes of the largest image that it takes
    encoder_cache_tokens: Annotated[
        PositiveInt, doc("encoder cache size: tokens of encoder outputs kept for the decoder")
    ] = 16_384
    encoder_chunk_tokens: Annotated[
        int, doc("encoder chunk: most encoder tokens in one step beside decodes (0: any)", ge=0)
    ] = 64
    num_lookahead_tokens: Annotated[
        int, doc("KV slots reserved per request for draft tokens", ge=0)
    ] = 0
    pipeline_depth: Annotated[
        Annotated[int, Meta(ge=1, le=2)] | None,
        doc(
            "steps in flight: 2 plans a step while the runner computes the one before (default: 2 "
            "on a CUDA device, else 1)"
        ),
    ] = None
    decision_log: Annotated[
        str | None,
        doc("file in which every scheduling decision and its input are recorded (default: none)"),
    ] = None
    request_log: Annotated[
        str | None,
        doc("file in which the arrival and lengths of every request are noted (default: none)"),
    ] = None

    def step_budget(self, max_model_len: int) -> int:
        """Most tokens in one step: as set, else enough for one whole request."""
        return self.max_num_batched_tokens or max(DEFAULT_STEP_BUDGET, max_model_len)

    def max_chunk(self, max_model_len: int) -> int:
        """Most tokens of one request in one step."""
        budget = self.step_budget(max_model_len)
        return min(budget, self.long_prefill_token_threshold or budget)

    def max_whole(self, max_model_len: int) -> int:
        """Most tokens that surely get one step to themselves: beside a decode of all others, with
        their drafts, which may come in every step. Below 1 if there are none.
        """
        others = (self.max_num_seqs - 1) * (1 + self.num_lookahead_tokens)
        return min(self.max_chunk(max_model_len), self.step_budget(max_model_len) - others)

    @property
    def depth(self) -> int:
        """`pipeline_depth`, once the runner has been asked; 1 until then."""
        return self.pipeline_depth or 1
