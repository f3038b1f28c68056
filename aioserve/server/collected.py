"""What the deltas of a request amount to: whole choices, and counts of tokens.

Knows outputs; knows nothing about HTTP, nor how they are told.
"""

import math
from collections.abc import Sequence

import msgspec

from aioserve.engine import RequestStream
from aioserve.outputs import RequestOutput, TokenLogprobs
from aioserve.params import SamplingParams
from aioserve.server.protocol import Usage


class Tally:
    """Token counts of all prompts and samples of one HTTP request."""

    def __init__(self, streams: Sequence[RequestStream]) -> None:
        self._num_prompt_tokens = sum(stream.num_prompt_tokens for stream in streams)
        self._num_output_tokens: dict[int, int] = {}
        self._num_cached_tokens: dict[int, int] = {}

    def note(self, index: int, output: RequestOutput) -> None:
        """The next delta of choice `index`."""
        self._num_output_tokens[index] = output.num_output_tokens
        if output.index == 0:  # the other samples may have found the first one's blocks
            self._num_cached_tokens[index] = output.num_cached_tokens

    def usage(self) -> Usage:
        """Of all of them, so far."""
        return Usage.of(
            self._num_prompt_tokens,
            sum(self._num_output_tokens.values()),
            sum(self._num_cached_tokens.values()),
        )


class Collected:
    """All deltas of one choice. Lists are extended in place: merging would copy every time."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._last: RequestOutput | None = None

    def add(self, output: RequestOutput) -> None:
        """Append the text, tokens and logprobs of the next delta."""
        self._texts.append(output.text)
        self._token_ids += output.token_ids
        self._logprobs += output.logprobs or ()
        self.prompt_logprobs = self.prompt_logprobs or output.prompt_logprobs
        self._last = output

    def output(self) -> RequestOutput:
        """All deltas joined, as one output."""
        assert self._last is not None, "a stream ends only after every sample has finished"
        return msgspec.structs.replace(
            self._last,
            text="".join(self._texts),
            token_ids=self._token_ids,
            logprobs=self._logprobs or None,
            prompt_logprobs=self.prompt_logprobs,
        )


def whole_outputs(choices: Sequence[Collected], n: int) -> list[RequestOutput]:
    """The choices of prompts with `n` samples each, of which the first tells how likely the prompt
    was: here all do.
    """
    for index, choice in enumerate(choices):
        choice.prompt_logprobs = choices[index - index % n].prompt_logprobs
    return [choice.output() for choice in choices]


def best_outputs(samples: Sequence[RequestOutput], wanted: SamplingParams) -> list[RequestOutput]:
    """The `n` samples of a prompt whose tokens are most likely on average, the best first.

    All come with logprobs; they keep them if those are wanted.
    """

    def mean(output: RequestOutput) -> float:
        values = [entry.logprob for entry in output.logprobs or ()]
        return sum(values) / len(values) if values else -math.inf

    best = sorted(samples, key=mean, reverse=True)[: wanted.n]
    if wanted.logprobs is None:
        best = [msgspec.structs.replace(output, logprobs=None) for output in best]
    return best
