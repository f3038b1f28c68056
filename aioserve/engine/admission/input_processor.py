"""From what a caller sends to checked token ids: chat template, tokenizer, lengths, ranges.

Everything that can be wrong with a request is refused here. Knows nothing about scheduling.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any, TypeVar, cast

import msgspec

from aioserve.engine.admission.chat_template import Conversation, Messages
from aioserve.engine.admission.content_text import MARK, unmarked
from aioserve.engine.admission.multimodal_prompts import Encoded, MultimodalProcessor, ReadMedia
from aioserve.engine.admission.prompt_limit import PromptLimit
from aioserve.engine.admission.sampling_validator import NO_TOKENIZER, SamplingValidator
from aioserve.errors import RequestError
from aioserve.grammars import GrammarCompiler
from aioserve.model_info import ModelInfo
from aioserve.multimodal import MultimodalPrompt
from aioserve.multimodal.families import family_of
from aioserve.params import PoolingParams, SamplingParams
from aioserve.runner.info import RunnerInfo

R = TypeVar("R")

#: Text, token ids, chat messages with "role" and "content", those and tools, or what has images.
#: Token ids with encoder inputs are for runners of which it is known that these suit them.
Prompt = str | Sequence[int] | Messages | Conversation | MultimodalPrompt | Encoded

# Longer texts are tokenized in a thread: some 5 microseconds of event loop per 10 characters is
# what a short one costs (measured with the embedded tokenizer), 2,000 characters about 1 ms.
INLINE_CHARACTERS = 2_000
# Conversations of more messages wait there for their template, too: some 50 microseconds a message.
SHORT_MESSAGES = 20
# And those with more tools: their schemas are of any size.
SHORT_TOOLS = 4


class InputProcessor:
    """Makes token ids and complete sampling parameters, or raises `RequestError`."""

    def __init__(
        self,
        model_info: ModelInfo,
        max_model_len: int,
        seed: int,
        grammars: GrammarCompiler | None = None,
        *,
        runner_info: RunnerInfo,
    ) -> None:
        """`grammars` is what the runner masks by; None if it does not."""
        self._grammars = grammars
        self._has_tokenizer = not model_info.config.skip_tokenizer_init
        self._vocab_size = model_info.vocab_size
        family = family_of(model_info) if runner_info.supports_images else None
        self._arrays = () if family is None else family.arrays  # that each encoder input must have
        self._token_ids = list[Annotated[int, msgspec.Meta(ge=0, lt=self._vocab_size)]]
        self._max_model_len = max_model_len
        if self._has_tokenizer:
            self._tokenizer = model_info.tokenizer
            self._illustrations = MultimodalProcessor(model_info, self._tokenizer, runner_info)
            self._chat_template = self._illustrations.template
            self._content = self._illustrations.content
            self._backend = getattr(self._tokenizer, "backend_tokenizer", None)
            if self._backend is not None:
                self._backend.no_truncation()
                self._backend.no_padding()
            vocabulary = self._tokenizer.get_vocab()
            self._max_token_bytes = max(map(len, vocabulary), default=1)
            # A tokenizer may know tokens that were added without weights for them.
            self._has_strangers = max(vocabulary.values(), default=0) >= self._vocab_size
        self.sampling = SamplingValidator(
            model_info, seed, self._encode_word, self._decode, runner_info=runner_info
        )
        # One thread: tokenizing beside the model's threads gains nothing from more. Images have
        # one of their own, so that no text waits for them, and so do templates of what is short.
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="aioserve-tokenizer")
        self._template_executor = ThreadPoolExecutor(1, thread_name_prefix="aioserve-template")
        self._image_executor = ThreadPoolExecutor(1, thread_name_prefix="aioserve-image")

    @property
    def media(self) -> ReadMedia:
        """What prompts may hold besides text."""
        return self._illustrations.media if self._has_tokenizer else ReadMedia.none(NO_TOKENIZER)

    def room(self, params: SamplingParams | PoolingParams) -> PromptLimit:
        """What `params` leave to a prompt."""
        return PromptLimit.of(params, self._max_model_len)

    def least_tokens(self, prompt: Prompt, room: PromptLimit) -> int:
        """How many tokens of a prompt there are at least to keep, as far as its length alone can
        tell.

        Raises `RequestError` for what is no prompt, and for one that is too long in any case: even
        in a thread, megabytes of text delay all requests.
        """
        num_image_tokens = 0
        if isinstance(prompt, Encoded):
            prompt = prompt.token_ids
        if isinstance(prompt, MultimodalPrompt):
            if not self._has_tokenizer:
                raise RequestError(f"{NO_TOKENIZER}: send token ids", param="prompt")
            prompt, num_image_tokens = self._illustrations.look_at(prompt, room)
        if isinstance(prompt, Conversation):
            prompt = prompt.messages
        if isinstance(prompt, str):
            num_tokens = self._least_tokens_of(prompt)
        elif len(prompt) == 0:
            raise RequestError("the prompt is empty", param="prompt")
        elif isinstance(prompt[0], Mapping):
            num_tokens = self._least_tokens_of_messages(prompt)
        else:
            num_tokens = room.kept(len(prompt))
            room.check(num_tokens)
            return num_tokens
        if not self._has_tokenizer:
            raise RequestError(f"{NO_TOKENIZER}: send token ids", param="prompt")
        num_tokens = room.kept(max(num_tokens, num_image_tokens))
        room.check(num_tokens, "at least ")
        return num_tokens

    async def tokenize(self, prompt: Prompt, room: PromptLimit) -> Encoded:
        """A prompt that `least_tokens` has let pass: its token ids, those to keep, checked against
        the vocabulary and the length limit, and its images. Raises `RequestError`.
        """
        encoded = await self._encode_whole(prompt, room, True)
        if not encoded.token_ids:
            raise RequestError("the prompt is empty", param="prompt")
        room.check(len(encoded.token_ids))
        return encoded

    async def encode(
        self, prompt: Prompt, room: PromptLimit, add_special_tokens: bool = True
    ) -> list[int]:
        """The token ids, however many there are. The flag is for text."""
        return (await self._encode_whole(prompt, room, add_special_tokens)).token_ids

    async def _encode_whole(
        self, prompt: Prompt, room: PromptLimit, add_special_tokens: bool
    ) -> Encoded:
        if isinstance(prompt, MultimodalPrompt):
            encode = self._illustrations.encode
            work = partial(encode, prompt, room, add_special_tokens, self._encode)
            return await asyncio.get_running_loop().run_in_executor(self._image_executor, work)
        if isinstance(prompt, Encoded):
            assert room.keep is None, "what is cut off would take its images along"
            token_ids = self._check_vocabulary(prompt.token_ids, "prompt")
            prompt.check_arrays(self._arrays)
            return Encoded(token_ids, prompt.encoder_inputs)
        return Encoded(room.cut(await self._encode_all(prompt, room, add_special_tokens)))

    async def _encode_all(
        self,
        prompt: str | Sequence[int] | Messages | Conversation,
        room: PromptLimit,
        add_special_tokens: bool,
    ) -> list[int]:
        if isinstance(prompt, str):
            is_long = len(prompt) > INLINE_CHARACTERS
            return await self._run(is_long, self._encode, prompt, add_special_tokens)
        if isinstance(prompt, Conversation):
            return await self._encode_conversation(prompt, room)
        if isinstance(prompt[0], Mapping):
            return await self._encode_conversation(Conversation(cast(Messages, prompt)), room)
        if room.keep is None:
            room.check(len(prompt))
        return self._check_vocabulary(prompt, "prompt")

    async def _encode_conversation(
        self, conversation: Conversation, room: PromptLimit
    ) -> list[int]:
        messages = conversation.messages
        length = sum(len(message["content"] or "") for message in messages)
        is_long = (
            length > INLINE_CHARACTERS
            or len(messages) > SHORT_MESSAGES
            or len(conversation.tools) > SHORT_TOOLS
            or any(message.get("tool_calls") for message in messages)
        )
        if is_long:
            return await self._run(True, self._render_and_encode, conversation, room)
        loop = asyncio.get_running_loop()
        executor = self._template_executor
        text = await loop.run_in_executor(executor, self._render, conversation, room)
        return await self._run(len(text) > INLINE_CHARACTERS, self._encode, text, False)

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text of these tokens, with the special ones. Raises `RequestError`."""
        if not self._has_tokenizer:
            raise RequestError(NO_TOKENIZER, param="tokens")
        ids = self._check_vocabulary(token_ids, "tokens")
        return await self._run(len(ids) > INLINE_CHARACTERS, self._decode, ids)

    async def check_grammar(self, params: SamplingParams) -> None:
        """Compile what the text must look like. Raises `RequestError` that says what cannot be."""
        wanted, budget = params.structured_outputs, params.thinking_budget
        if wanted is None and budget is None:
            return
        if self._grammars is None:
            reason = (
                "this engine's runner has no logits to mask"
                if self._has_tokenizer
                else NO_TOKENIZER
            )
            name = "thinking_budget" if wanted is None else "structured_outputs"
            raise RequestError(f"{name} cannot be served: {reason}", name)
        if wanted is not None:
            await self._grammars.check(wanted)

    def close(self) -> None:
        """Let the threads end; requests that still wait for them are refused afterwards."""
        for executor in (self._executor, self._template_executor, self._image_executor):
            executor.shutdown(wait=False)
        if self._has_tokenizer:
            self._chat_template.close()

    def _least_tokens_of(self, text: str) -> int:
        num_bytes = len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))
        return num_bytes // self._max_token_bytes if self._has_tokenizer else 0

    def _least_tokens_of_messages(self, messages: Sequence[Any]) -> int:
        num_tokens = 0
        for i, message in enumerate(messages):
            for key in ("role", "content"):
                if message.get(key) is None and message.get("tool_calls") and key == "content":
                    continue  # calls are all that it says
                if not isinstance(message.get(key), str):
                    raise RequestError(
                        f"messages[{i}].{key} must be a string, got {message.get(key)!r}",
                        param="messages",
                    )
            # No template tells of a message in less than a token.
            num_tokens += max(1, self._least_tokens_of(message["content"] or ""))
        return num_tokens

    async def _run(self, is_long: bool, work: Callable[..., R], *args: Any) -> R:
        """Here and now, or in the thread, so that the event loop can go on."""
        if not is_long:
            return work(*args)
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, *args)

    def _render(self, conversation: Conversation, room: PromptLimit) -> str:
        text = self._chat_template.render(conversation)
        room.check(room.kept(self._least_tokens_of(unmarked(text))), "at least ")
        return text

    def _render_and_encode(self, conversation: Conversation, room: PromptLimit) -> list[int]:
        return self._encode(self._render(conversation, room), add_special_tokens=False)

    def _encode_word(self, text: str) -> list[int]:
        return self._encode(text, add_special_tokens=False, field="bad_words")

    def _encode(self, text: str, add_special_tokens: bool, field: str = "prompt") -> list[int]:
        try:
            if self._content is not None and MARK in text:
                ids = self._content.encode(text)
            elif self._backend is None:
                ids = list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
            else:
                # The batch call releases the GIL; "fast" skips offsets, which are not read.
                encode = self._backend.encode_batch_fast
                ids = encode([text], add_special_tokens=add_special_tokens)[0].ids
        except (UnicodeEncodeError, TypeError) as error:  # which one, depends on the tokenizer
            what = "the prompt" if field == "prompt" else field
            raise RequestError(f"{what} is not valid Unicode: {error}", field) from error
        if self._has_strangers and (stranger := max(ids, default=0)) >= self._vocab_size:
            what = "the prompt" if field == "prompt" else field
            raise RequestError(
                f"{what} has the token {self._tokenizer.convert_ids_to_tokens(stranger)!r}, "
                f"which is number {stranger} of the tokenizer: the model has {self._vocab_size}",
                field,
            )
        return ids

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, clean_up_tokenization_spaces=False))

    def _check_vocabulary(self, given: Sequence[Any], name: str) -> list[int]:
        ids = list(given)
        try:
            return msgspec.convert(ids, self._token_ids)
        except msgspec.ValidationError:
            known = range(self._vocab_size)
            i = next(i for i, x in enumerate(ids) if type(x) is not int or x not in known)
            raise RequestError(
                f"{name}[{i}] must be a token id from 0 to {self._vocab_size - 1}, got {ids[i]!r}",
                param=name,
            ) from None
