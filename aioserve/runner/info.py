"""What a runner can do and has room for, as one value. Free of torch.

The engine, its API workers and Ray replicas pass it on whole, so that a new capability is one field
here, one line in the runner that has it and one in the code that asks for it.
"""

import msgspec

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
