"""The wire structs of log probabilities, of every format that has them."""

import msgspec


class PromptLogprob(msgspec.Struct, kw_only=True):
    """One token at a position of the prompt, as vLLM shows it."""

    logprob: float
    rank: int  # 1: the most likely
    decoded_token: str


#: By token of the prompt; null for the first. By token id: the prompt's own, then alternatives.
PromptLogprobs = list[dict[int, PromptLogprob] | None]


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Parallel lists, one entry per token; of the first of an echoed prompt, nothing is known."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(msgspec.Struct, kw_only=True):
    """One alternative at a position."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob, kw_only=True):
    """The sampled token and its alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """Logprobs of a reply, one entry per token."""

    content: list[ChatTokenLogprob]
