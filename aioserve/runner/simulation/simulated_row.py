"""What the simulated runner remembers of a request, and what it invents for it: the same each time.

Knows a request and a seed; knows nothing about steps and their time.
"""

from zlib import crc32

import msgspec

from aioserve.outputs import TokenLogprobs
from aioserve.scheduler.output import NewRequestData

NEVER = 2**62  # as a position
_MASK = 2**64 - 1
_encode = msgspec.msgpack.Encoder().encode


class SimulatedRow:
    """A request in the batch of the simulated runner: its lengths, and the seed of what it says."""

    __slots__ = (
        "encoder_inputs",
        "eos_position",
        "eos_token_id",
        "hash",
        "num_logprobs",
        "num_prompt_tokens",
        "num_tokens",
        "offset",
        "pooling",
        "prompt",
    )

    def __init__(
        self, data: NewRequestData, mean_output_tokens: int, seed: int, vocab_size: int
    ) -> None:
        prompt = data.token_ids
        if len(prompt) > data.num_prompt_tokens:  # it was preempted
            prompt = prompt[: data.num_prompt_tokens]
        params = data.sampling_params
        self.num_tokens = len(data.token_ids)
        self.num_prompt_tokens = data.num_prompt_tokens
        self.num_logprobs = params.logprobs
        # Until it was told how likely its prompt is, if it asks.
        is_asking = params.prompt_logprobs is not None and len(prompt) == len(data.token_ids)
        self.prompt = certain(prompt[1:], params.prompt_logprobs or 0) if is_asking else None
        self.encoder_inputs = data.encoder_inputs
        self.pooling = data.pooling_params
        # Token and length depend on the prompt alone, so that they are equal under every policy.
        self.hash = crc32(_encode([seed, prompt]))
        self.offset = self.hash % vocab_size
        # From 1 to twice the mean, evenly: replies of varied lengths make schedulers visible.
        num_output_tokens = max(1 + self.hash % (2 * mean_output_tokens - 1), params.min_tokens)
        self.eos_token_id = min(data.stop_token_ids, default=-1)
        self.eos_position = self.num_prompt_tokens + num_output_tokens
        if not data.stop_token_ids:
            self.eos_position = NEVER


def draw(seed: int, place: int) -> float:
    """A number from 0 to 1, even, and independent of the places beside: a CRC would not be, it is
    linear. The mixing of splitmix64 (Steele, Lea and Flood, 2014).
    """
    x = (seed << 32 | place) * 0x9E3779B97F4A7C15 & _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return (x ^ x >> 31) / 2**64


def certain(token_ids: list[int], num_logprobs: int) -> list[TokenLogprobs]:
    """All probability on each of these tokens."""
    top = min(num_logprobs, 1)
    return [TokenLogprobs(0.0, 1, [token_id][:top], [0.0][:top]) for token_id in token_ids]
