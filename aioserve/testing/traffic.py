"""What the state machine draws: pools, limits and requests, small enough to be crowded.

Knows hypothesis. Knows nothing about what a scheduler does with them.
"""

from typing import Any

from hypothesis import strategies as st

from aioserve.params import PoolingParams, StructuredOutputs
from aioserve.request import EncoderInput
from aioserve.testing.hinted import STRANGE, USUAL
from aioserve.testing.replies import VOCAB_SIZE, guess

SOMETIMES = st.sampled_from([False, False, True])
RARELY = st.sampled_from([False] * 9 + [True])
#: Of harness settings, requests and events, what only a `BaseScheduler` has to understand.
EXTRAS = (
    "drafter",
    "encoder_chunk_tokens",
    "encoder_inputs",
    "kv_connector",
    "max_encoder_tokens",
    "max_loras",
    "num_host_slots",
    "num_lookahead_tokens",
    "num_spare_window_blocks",
    "num_state_slots",
    "pooling_params",
    "window",
)

VICTIMS = ("policy", "newest", "lowest_priority", "least_computed", "most_remaining", "least_lost")


@st.composite
def harness_settings(draw: st.DrawFn) -> dict[str, Any]:
    """Keyword arguments of `SchedulerHarness`: pools from exactly one request's worth upwards."""
    block_size = draw(st.sampled_from([1, 2, 4]))
    max_model_len = draw(st.sampled_from([8, 20, 40]))
    least_blocks = -(-(max_model_len - 1) // block_size)  # the last token needs no slot
    settings: dict[str, Any] = {
        "num_blocks": least_blocks + draw(st.integers(0, 15)),
        "block_size": block_size,
        "max_model_len": max_model_len,
        "max_num_seqs": draw(st.sampled_from([8, 8, 3, 1])),
        "max_num_batched_tokens": draw(st.sampled_from([80, 80, max_model_len, 7, 1])),
        "victim": draw(st.sampled_from(VICTIMS)),
    }
    if draw(SOMETIMES):
        settings["long_prefill_token_threshold"] = draw(st.sampled_from([3, 7]))
    if draw(SOMETIMES):
        settings["enable_prefix_caching"] = draw(st.booleans())
        settings["watermark"] = draw(st.sampled_from([0.0, 0.2]))
        settings["step_seconds"] = 0.01
    if draw(SOMETIMES):
        settings["queue_timeout"] = draw(st.sampled_from([1e6, 10.0]))
        settings["max_waiting_requests"] = draw(st.sampled_from([1000, 2]))
    if draw(SOMETIMES):
        settings["max_encoder_tokens"] = draw(st.sampled_from([4, 9]))
        settings["encoder_cache_tokens"] = draw(st.sampled_from([4, 5, 9]))
        settings["encoder_chunk_tokens"] = draw(st.sampled_from([0, 1, 3]))
    settings["max_loras"] = 1 + settings["num_blocks"] % 3
    if draw(SOMETIMES):
        settings["kv_connector"] = draw(st.sampled_from(["memory", "disk"]))
        settings["num_host_slots"] = draw(st.sampled_from([40, 10, 2]))
    if draw(SOMETIMES):
        settings["num_state_slots"] = draw(st.sampled_from([24, 9, 4, 1]))
    if draw(SOMETIMES):
        settings["drafter"] = guess
        settings["num_lookahead_tokens"] = draw(st.sampled_from([0, 3]))
    if draw(SOMETIMES):
        settings["window"] = draw(st.sampled_from([1, 3, 9, 24]))
        settings["num_spare_window_blocks"] = draw(st.sampled_from([0, 3, 12]))
    return settings


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """Keyword arguments of `SchedulerHarness.add_request`, but for the name.

    Cut the prompt to what the harness takes. Times are in seconds from now.
    """
    length = draw(st.sampled_from([40, 30, 20, 10])) - draw(st.integers(0, 9))
    num_common, tail = draw(st.sampled_from([40, 0, 5, 13])), draw(st.integers(0, 20))
    request: dict[str, Any] = {
        "prompt_token_ids": [
            i // 5 if i < num_common else (tail * 7 + i * i) % VOCAB_SIZE for i in range(length)
        ]
    }
    if tail > 14:
        request["adapter_id"] = f"a{length % 3}"
    if draw(SOMETIMES):
        request["max_tokens"] = draw(st.integers(1, 6))
    if draw(SOMETIMES):
        request |= draw(_IDENTITIES)
    if draw(SOMETIMES):
        request["hints"] = dict(draw(_HINTS))
    if draw(SOMETIMES):
        request |= draw(_STOPS)
        request["min_tokens"] = min(request["min_tokens"], request.get("max_tokens", 3))
    elif draw(SOMETIMES):
        request |= draw(_STRUCTURED)
    if draw(RARELY):
        request["deadline"] = draw(st.sampled_from([0.1, 3.0, 12.0]))
    if draw(st.booleans()):
        request["encoder_inputs"] = draw(_ENCODER_INPUTS)
    return request


_IDENTITIES = st.fixed_dictionaries(
    {
        "priority": st.integers(0, 2),
        "user": st.sampled_from(["", "ann", "bob"]),
        "client_index": st.integers(0, 2),
        "cache_salt": st.sampled_from(["", "", "salt"]),
        "pooling_params": st.sampled_from(
            [None, None, PoolingParams(pooling="mean"), PoolingParams(pooling="last")]
        ),
    }
)

#: Usual ones three times as often as strange ones. None changes what is answered.
_HINTS = st.lists(
    st.sampled_from(
        [(name, value) for name, values in USUAL.items() for value in values] * 3
        + [(name, value) for name, values in STRANGE.items() for value in values]
    ),
    max_size=4,
)

_STOPS = st.fixed_dictionaries(
    {
        "eos_token_ids": st.sampled_from([(), (0,), tuple(range(8))]),
        "stop_token_ids": st.sampled_from([(), (1,), tuple(range(5, 15))]),
        "ignore_eos": st.booleans(),
        "min_tokens": st.integers(0, 3),
    }
)


#: Tokens that are forced at the beginning, in the middle, to the end, never; an end that goes on.
_STRUCTURED = st.fixed_dictionaries(
    {
        "structured_outputs": st.sampled_from(
            [StructuredOutputs(choice=c) for c in (("abcdefgh",), ("abcd", "abefgh", "ab"), ("",))]
        ),
        "eos_token_ids": st.sampled_from([(0,), (0, 49)]),
        "arrival_time": st.sampled_from([0.0, 0.0, -5.0]),  # then it waited for its grammar
    }
)


def _encoder_inputs(gaps_and_contents: list[tuple[int, int]]) -> tuple[EncoderInput, ...]:
    items, position = [], 0
    for gap, content in gaps_and_contents:
        # A content has one size, of one to four tokens; contents repeat. Some run whole.
        name, is_whole = f"image-{content}", content in (2, 5)
        item = EncoderInput(position + gap, content % 4 + 1, name, whole=is_whole)
        items.append(item)
        position = item.end
    return tuple(items)


_ENCODER_INPUTS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 5)), min_size=1, max_size=4
).map(_encoder_inputs)
