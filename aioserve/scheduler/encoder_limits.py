"""What the settings of a scheduler say of encoder outputs. Knows settings; keeps no output."""

from aioserve.config import SchedulerConfig
from aioserve.kv_cache import EncoderLimits


def encoder_limits(
    config: SchedulerConfig, max_model_len: int, runs_whole_prompts: bool
) -> EncoderLimits:
    """The room for encoder outputs, and how much of them a step computes."""
    return EncoderLimits(
        num_slots=config.encoder_cache_tokens,
        step_tokens=config.max_encoder_tokens,
        max_whole=config.max_whole(max_model_len),
        runs_whole_prompts=runs_whole_prompts,
        chunk=config.encoder_chunk_tokens,
    )
