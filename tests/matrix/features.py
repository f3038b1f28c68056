"""The features of the matrix, and which of them mean nothing beside which others, and why.

Names and reasons alone: what a feature does to a run is in `runs`, to a model in `built`.
"""

from collections.abc import Collection, Iterator
from itertools import combinations

#: By name, what the row of the page says of it.
FEATURES: dict[str, str] = {
    "chunked prefill": "prompts in pieces of 16 tokens",
    "prefix cache": "prompts come again, and are found",
    "preemption": "so few blocks that requests are preempted, as in every cell; here it is proved",
    "pauses": "the policy pauses half of the running requests at every turn",
    "depth 2": "two steps in flight",
    "n > 1": "two samples of a prompt",
    "logprobs": "three alternatives of every token",
    "prompt logprobs": "two alternatives of every prompt token",
    "penalties": "repetition, presence and frequency",
    "seeded sampling": "temperature 0.8 and a seed, every draw that of the request alone",
    "stop strings": "five of one letter, from the last quarter of a reply on (`min_tokens`)",
    "thinking budget": "four tokens of reasoning, then the end mark is forced",
    "grammars": "one of four texts, which share beginnings",
    "tools": "a forced tool call, read by the parser `hermes`",
    "added tokens": "one of four texts with `<tool_call>` or `<think>`, tokens that are text",
    "n-gram drafts": "`--speculative-method ngram`",
    "draft model": "`--speculative-method draft`, a small Llama",
    "EAGLE": "`--speculative-method draft`, an EAGLE-3 head",
    "MTP": "`--speculative-method mtp`",
    "adapters": "every second request has one",
    "few-bit weights": "`--quantization int8`",
    "int8 activations": "`--activations int8` beside `--quantization int8`",
    "int8 cache": "`--kv-cache-dtype int8`; on a card `fp8`",
    "images": "Idefics3; prompts of none to two images",
    "states": "Qwen3.5, linear attention beside attention",
    "windows": "Qwen3 with two layers of sliding-window attention, and `--num-window-blocks`",
    "experts": "Mixtral",
    "embeddings": "vectors of prompts beside replies",
    "connector, memory": "`--kv-connector memory`",
    "connector, directory": "`--kv-connector disk`",
    "leases": "the policy pins the prefix of each request that ends",
    "sleep": "twice meanwhile, weights freed",
    "reload": "twice meanwhile, of a copy of the model",
    "policy switch": "to `fcfs` and back meanwhile",
    "shadow": "`--shadow-policy fcfs`",
    "decision log": "which is replayed afterwards",
}

#: What the model is: one that has all of a run's.
MODELS = ("images", "states", "windows", "experts")
#: Fields of requests that go with each other in one.
FIELDS = (
    *("n > 1", "logprobs", "prompt logprobs", "penalties"),
    *("seeded sampling", "stop strings", "thinking budget"),
)
#: Results are another model's than in float32: they are compared with each request alone.
ROUNDED = ("few-bit weights", "int8 activations", "int8 cache")

_ONE_OF: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("n-gram drafts", "draft model", "EAGLE", "MTP"),
        "one method drafts at a time: `speculation.speculative_method`",
    ),
    (
        ("connector, memory", "connector, directory"),
        "an engine has one: `cache.kv_connector`; `disk` keeps blocks in host memory as well",
    ),
)
_NEVER: dict[frozenset[str], str] = {
    frozenset(("images", "states")): "no family of vision models that is served has states",
    frozenset(("images", "MTP")): "no family of vision models that is served has an MTP layer",
}
#: What asks for models of which `transformers` computes a part, in sums that depend on the batch.
_IN_PART = (("states",), ("windows", "MTP"), ("experts", "MTP"), ("images", "windows"))
_ROUNDED_BESIDE = (
    "where the batch changes the last bit of an activation, it may be rounded to the code beside: "
    "such a model's replies are compared in the cell of two alone"
)


def why_not(features: Collection[str]) -> str | None:
    """Why these features do not come together in any engine; None: they may."""
    for group, reason in _ONE_OF:
        if len(set(group) & set(features)) > 1:
            return reason
    asked = frozenset(features)
    is_in_part = any({"int8 activations", *model} <= asked for model in _IN_PART)
    if is_in_part and len(asked) > 2:
        return _ROUNDED_BESIDE
    return next((reason for never, reason in _NEVER.items() if never <= asked), None)


def cells() -> Iterator[tuple[str, ...]]:
    """Every feature alone, then every pair, in the order of `FEATURES`."""
    yield from ((name,) for name in FEATURES)
    yield from combinations(FEATURES, 2)


def in_order(features: Collection[str]) -> tuple[str, ...]:
    """These features in the order of `FEATURES`."""
    return tuple(name for name in FEATURES if name in features)
