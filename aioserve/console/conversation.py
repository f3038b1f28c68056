"""A conversation with a running server: what was said, how replies are sampled, how long they took.

Knows `AsyncClient`. Knows nothing of terminals.
"""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from aioserve.client import AsyncClient
from aioserve.errors import RequestError
from aioserve.nearest import did_you_mean
from aioserve.outputs import FinishReason
from aioserve.sampling_defaults import SamplingDefaults
from aioserve.sampling_params import SamplingParams

#: What can be set between two replies. The rest of `SamplingParams` is for programs.
SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "stop"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos"),
)


class Reply(msgspec.Struct):
    """What one reply took; its tokens as the server counts them."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    finish_reason: FinishReason | None = None  # None: it was stopped, or has failed
    first_text: float | None = None  # seconds after it was asked for
    seconds: float = 0.0  # until its last text
    num_first_tokens: int = 0  # those of the first text

    @property
    def tokens_per_second(self) -> float | None:
        """After the first text; None if all came at once."""
        if self.first_text is None or self.num_output_tokens == self.num_first_tokens:
            return None
        duration = max(self.seconds - self.first_text, 1e-6)
        return (self.num_output_tokens - self.num_first_tokens) / duration


class Conversation:
    """With one model. Its messages stay when a reply is stopped or fails half-way."""

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self.system = ""
        self.defaults = SamplingDefaults()  # of what is not set
        self.sampling: dict[str, Any] = {}  # what was set, checked
        self.has_template = True  # as long as the server does not say otherwise
        self.replies: list[Reply] = []
        self._messages: list[dict[str, str]] = []

    def reset(self) -> None:
        """Forget what was said; settings stay."""
        self._messages.clear()
        self.replies.clear()

    def set_sampling(self, name: str, text: str) -> None:
        """`text` as a command line has it; nothing: the default again. Raises `RequestError`."""
        if name not in SAMPLING:
            known, meant = ", ".join(SAMPLING), did_you_mean(name, SAMPLING)
            raise RequestError(f"{name!r} is no setting{meant}; the settings are {known}", name)
        others = {key: value for key, value in self.sampling.items() if key != name}
        if text:
            kinds = {field.name: field.type for field in msgspec.structs.fields(SamplingParams)}
            try:
                others[name] = msgspec.convert(text, kinds[name], strict=False)
            except msgspec.ValidationError as error:
                raise RequestError(f"{name}: {error}", name) from error
            SamplingParams(**others)  # the range
        self.sampling = others

    async def ask(self, text: str) -> AsyncGenerator[str, None]:
        """The reply to `text`, as it comes. Raises what `AsyncClient` raises; what was said before
        an error, or before the generator is closed, stays said.
        """
        self._messages.append({"role": "user", "content": text})
        reply, said, began = Reply(), "", time.perf_counter()
        self.replies.append(reply)
        try:
            async with aclosing(self._outputs()) as outputs:
                async for output in outputs:
                    reply.num_prompt_tokens = output.num_prompt_tokens
                    reply.num_cached_tokens = output.num_cached_tokens
                    reply.num_output_tokens = output.num_output_tokens
                    reply.finish_reason = output.finish_reason
                    reply.seconds = time.perf_counter() - began
                    if output.text:
                        if reply.first_text is None:
                            reply.first_text = reply.seconds
                            reply.num_first_tokens = output.num_output_tokens
                        said += output.text
                        yield output.text
        finally:
            if said or reply.finish_reason is not None:
                self._messages.append({"role": "assistant", "content": said})
            else:  # it was never answered
                self._messages.pop()
                self.replies.pop()

    async def _outputs(self) -> AsyncGenerator[Any, None]:
        """Of the chat route; of the completions route, if the model has no chat template."""
        params = self.defaults.fill(self.sampling)
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, *self._messages]
        if self.has_template:
            try:
                async with aclosing(self.client.chat(messages, params)) as outputs:
                    async for output in outputs:
                        yield output
                return
            except RequestError as error:
                if "no chat template" not in str(error):
                    raise
                self.has_template = False
        prompt = "\n".join(message["content"] for message in messages)
        async with aclosing(self.client.generate(prompt, params)) as outputs:
            async for output in outputs:
                yield output
