"""What a runner can do and has room for, as one value. Free of torch.

The engine, its API workers and Ray replicas pass it on whole, so that a new capability is one field
here, one line in the runner that has it and one in the code that asks for it. Last, how many blocks
of the KV cache requests can use.
"""

import msgspec

from aioserve.config import EngineConfig
from aioserve.kv_cache import WindowSpec


class RunnerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that are known when a runner has loaded; they stay true for the runner's life."""

    #: Size of the KV pool, in blocks of `block_size` tokens.
    num_kv_blocks: int
    #: Steps to hand over before the first is back, where the settings do not say.
    pipeline_depth: int = 1
    #: Slots for the states of requests, of a model whose layers have states of a fixed size.
    num_state_slots: int | None = None
    #: What layers with a sliding window get, if they have a pool of their own.
    windows: WindowSpec | None = None
    #: Whether outputs tell how likely the tokens of prompts are (`prompt_logprobs`).
    supports_prompt_logprobs: bool = False
    #: Whether outputs have vectors of prompts (`pooled`).
    supports_pooling: bool = False
    #: Whether the encoder inputs of requests are run.
    supports_images: bool = False
    #: Most draft tokens that are proposed for a request after a step; 0: none ever are.
    max_draft_tokens: int = 0
    #: Whether outputs have the values of rows that a policy wants (`row_values`).
    gives_row_values: bool = False


# How many KV blocks requests can use, wherever they lie. Knows settings, no memory.


PREFIX_SHARE = 0.25  # of what all requests can use: room for prefixes of those that have left
TYPICAL_TOKENS = 2048  # of a request, for which several pools are made to last as long; a guess


def max_useful_blocks(config: EngineConfig, max_model_len: int) -> int:
    """Return blocks of `max_num_seqs` requests of `max_model_len` tokens, and `PREFIX_SHARE`
    more.
    """
    num_blocks = config.scheduler.max_num_seqs * -(-max_model_len // config.cache.block_size)
    if config.cache.enable_prefix_caching:
        num_blocks += int(num_blocks * PREFIX_SHARE)
    return num_blocks


def window_spec(
    config: EngineConfig, max_model_len: int, num_tokens: int, num_blocks: int | None = None
) -> WindowSpec:
    """Return the spec of layers that see `num_tokens` tokens, with `num_blocks` blocks; by default
    as many as `max_num_seqs` requests use.
    """
    spec = WindowSpec(
        num_tokens,
        0,
        max_chunk=config.scheduler.max_chunk(max_model_len),
        max_drafts=max(
            config.cache.block_size,  # what a grammar forces comes as drafts, too
            config.speculation.num_speculative_tokens,
            config.runner.simulated_draft_tokens,
        ),
    )
    if num_blocks is None:
        num_seqs = config.scheduler.max_num_seqs
        num_blocks = useful_window_blocks(config, spec, max_model_len, num_seqs)
    return msgspec.structs.replace(spec, num_blocks=num_blocks)


def useful_window_blocks(
    config: EngineConfig, spec: WindowSpec, max_model_len: int, num_seqs: int
) -> int:
    """Return the blocks that `num_seqs` requests use behind their prompts, with room for two
    prompts of `TYPICAL_TOKENS`, and `PREFIX_SHARE` of it more; one of `max_model_len` fits at
    least.
    """
    size = config.cache.block_size
    longest = -(-max_model_len // size)
    each = min(spec.num_decode_blocks(size), longest)
    prompt = spec.num_request_blocks(min(TYPICAL_TOKENS, max_model_len), max_model_len, size)
    num_blocks = num_seqs * each + 2 * (prompt - each)
    if config.cache.enable_prefix_caching:
        num_blocks += int(num_blocks * PREFIX_SHARE)
    return max(num_blocks, spec.num_request_blocks(max_model_len, max_model_len, size))
