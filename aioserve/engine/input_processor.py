"""From what a caller sends to checked token ids and complete parameters.

Everything that can be wrong with a request is refused here: its text, tokens and length, its
sampling parameters, its thinking budget, what it wants pooled. Knows nothing about scheduling.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Protocol, TypeVar, cast

import msgspec

from aioserve.engine.prompt import (
    MARK,
    NO_IMAGES,
    NO_VIDEOS,
    Conversation,
    Encoded,
    Messages,
    MultimodalPrompt,
    ReadMedia,
    unmarked,
)
from aioserve.errors import (
    RequestError,
    first_line,
    is_panic,
)
from aioserve.model_source.info import ModelInfo
from aioserve.params import (
    MAX_BAD_WORD_TOKENS,
    RUNNER_PARAMETERS,
    PoolingParams,
    SamplingParams,
)
from aioserve.runner.interface import OutputCompiler, RunnerInfo
from aioserve.support.parts import load

if TYPE_CHECKING:
    from aioserve.engine.chat_template import ChatTemplate
    from aioserve.engine.content_text import ContentText
    from aioserve.model_source.vision_families import Family


R = TypeVar("R")

#: Text, token ids, chat messages with "role" and "content", those and tools, or what has images.
#: Token ids with encoder inputs are for runners of which it is known that these suit them.
Prompt = str | Sequence[int] | Messages | Conversation | MultimodalPrompt | Encoded

# Longer texts are tokenized in a thread: some 5 microseconds of event loop per 10 characters is
# what a short one costs (measured with the embedded tokenizer), 2,000 characters about 1 ms.
INLINE_CHARACTERS = 2_000
# Shorter ones are tokenized with the GIL: to release it, and get it back from threads that compute,
# takes longer (measured: 35 microseconds in place of 3 for a word).
SHORT_CHARACTERS = 256
# Conversations of more messages wait there for their template, too: some 50 microseconds a message.
SHORT_MESSAGES = 20
# And those with more tools: their schemas are of any size.
SHORT_TOOLS = 4


class PromptLimit(NamedTuple):
    """The room that the model has for one prompt."""

    limit: int  # the most tokens that it may have
    in_words: str
    keep: int | None = None  # tokens of the end that are kept; None: all

    @classmethod
    def of(cls, params: SamplingParams | PoolingParams, max_model_len: int) -> "PromptLimit":
        """Return what `params` leave to the prompt. One that is pooled may fill the model."""
        keep = params.truncate_prompt_tokens
        if isinstance(params, PoolingParams):
            keep = max_model_len if keep == -1 else keep
            return cls(max_model_len, str(max_model_len), keep)
        if keep == -1:
            keep = max(1, max_model_len - (params.max_tokens or 1))
        return cls(max_model_len - 1, f"{max_model_len} for prompt and output together", keep)

    def kept(self, num_tokens: int) -> int:
        """Return how many tokens are kept of a prompt of this length."""
        return num_tokens if self.keep is None else min(num_tokens, self.keep)

    def cut(self, token_ids: list[int]) -> list[int]:
        """Return the tokens that are kept of a prompt."""
        return token_ids if self.keep is None else token_ids[-self.keep :]

    def check(self, num_tokens: int, qualifier: str = "") -> None:
        """Raises `RequestError` for more than `limit`."""
        if num_tokens > self.limit:
            raise RequestError(
                f"the prompt has {qualifier}{num_tokens} tokens, but the model's limit is "
                f"{self.in_words}",
                param="prompt",
            )


class MediaProcessor(Protocol):
    """A reader of prompts with images and videos, for one model and its tokenizer."""

    media: ReadMedia
    placeholders: Mapping[str, str]  # by kind, how a text mentions one

    def look_at(self, prompt: MultimodalPrompt, room: PromptLimit) -> tuple[str | Messages, int]:
        """Return the words of a prompt, without its images and videos, and how many tokens those
        stand for at least. Raises `RequestError` for those that cannot be served, or are not those
        mentioned.
        """

    def encode(
        self,
        prompt: MultimodalPrompt,
        room: PromptLimit,
        add_special_tokens: bool,
        encode: Callable[[str, bool], list[int]],
        render: Callable[[Conversation], str],
    ) -> Encoded:
        """Return a prompt that `look_at` has let pass. `encode` makes tokens of a text, with
        special ones or without, and `render` a text of a conversation. Raises `RequestError`; takes
        its time.
        """


class CallThread(Protocol):
    """A thread that hands results of calls to a loop quicker than executors do."""

    def call(self, loop: asyncio.AbstractEventLoop, work: Callable[[], R], /) -> Awaitable[R]: ...
    def shutdown(self, wait: bool = True) -> None: ...


class InputProcessor:
    """Makes token ids and complete sampling parameters, or raises `RequestError`."""

    def __init__(
        self,
        model_info: ModelInfo,
        max_model_len: int,
        seed: int,
        grammars: OutputCompiler | None = None,
        *,
        runner_info: RunnerInfo,
        template_thread: CallThread | None = None,
    ) -> None:
        """`grammars` is what the runner masks by; None if it does not. `template_thread`: for the
        templates of short conversations; None: it has one of its own.
        """
        self._grammars = grammars
        self._model_info, self._runner_info = model_info, runner_info
        self._marks_contents = model_info.config.content_special_tokens == "text"
        self._has_tokenizer = not model_info.config.skip_tokenizer_init
        self._vocab_size = model_info.vocab_size
        family = self._family if runner_info.supports_images else None
        self._arrays = () if family is None else family.arrays  # that each encoder input must have
        self._token_ids = list[Annotated[int, msgspec.Meta(ge=0, lt=self._vocab_size)]]
        self._max_model_len = max_model_len
        if self._has_tokenizer:
            self._tokenizer = model_info.tokenizer
            if family is not None:
                self._illustrations  # noqa: B018 - which says at the start what cannot be read
            if family is not None or self._marks_contents:
                self._template  # noqa: B018 - which says at the start what it cannot do
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
        self._template_thread = template_thread
        self._template_executor = ThreadPoolExecutor(1, thread_name_prefix="aioserve-template")
        self._image_executor = ThreadPoolExecutor(1, thread_name_prefix="aioserve-image")

    @cached_property
    def _family(self) -> "Family | None":
        """The family of models that see to which this one belongs; None: it is for text."""
        from aioserve.model_source.vision_families import family_of

        return family_of(self._model_info)

    @property
    def media(self) -> ReadMedia:
        """The media that prompts may hold besides text."""
        if not self._has_tokenizer:
            return ReadMedia.none(NO_TOKENIZER)
        if self._family is None:
            return ReadMedia(NO_IMAGES, NO_VIDEOS)
        return self._illustrations.media

    @cached_property
    def _illustrations(self) -> MediaProcessor:
        """The reader of images and videos: loaded by `load_for`, where a model of text alone is
        served.
        """
        processor: MediaProcessor = load("media", "prompts")(
            self._model_info, self._tokenizer, self._runner_info
        )
        return processor

    @cached_property
    def _content(self) -> "ContentText | None":
        """The marker of texts of clients that spell controls, where those are to be text."""
        if not self._marks_contents:
            return None
        from aioserve.engine.content_text import ContentText

        return ContentText(self._tokenizer)

    @cached_property
    def _template(self) -> "ChatTemplate":
        """The reader of conversations, loaded on the event loop for the first of them."""
        from aioserve.engine.chat_template import ChatTemplate

        placeholders = {} if self._family is None else self._illustrations.placeholders
        return ChatTemplate(self._tokenizer, placeholders, content=self._content)

    def room(self, params: SamplingParams | PoolingParams) -> PromptLimit:
        """Return how many tokens `params` leave to a prompt."""
        return PromptLimit.of(params, self._max_model_len)

    async def load_for(self, prompt: Prompt) -> None:
        """Load, in a thread, what reads images and videos, for the first prompt that might have
        some. To be awaited before `least_tokens`.
        """
        if isinstance(prompt, MultimodalPrompt) and self._has_tokenizer:
            if "_illustrations" not in self.__dict__:
                await asyncio.to_thread(lambda: self._illustrations)

    def least_tokens(self, prompt: Prompt, room: PromptLimit) -> int:
        """Return how many tokens of a prompt there are at least to keep, as far as its length alone
        can tell.

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
        elif not hasattr(prompt, "__getitem__") or isinstance(prompt, (Mapping, bytes)):
            raise RequestError(
                "the prompt must be a text, token ids or chat messages, got "
                f"{type(prompt).__name__}",
                param="prompt",
            )
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
        """Return a prompt that `least_tokens` has let pass: its token ids, those to keep, checked
        against the vocabulary and the length limit, and its images. Raises `RequestError`.
        """
        if isinstance(prompt, str) and len(prompt) <= INLINE_CHARACTERS:
            encoded = Encoded(room.cut(self._encode(prompt, add_special_tokens=True)))
        else:
            encoded = await self._encode_whole(prompt, room, True)
        if not encoded.token_ids:
            raise RequestError("the prompt is empty", param="prompt")
        room.check(len(encoded.token_ids))
        return encoded

    async def encode(
        self, prompt: Prompt, room: PromptLimit, add_special_tokens: bool = True
    ) -> list[int]:
        """Return the token ids, however many there are. The flag is for text."""
        return (await self._encode_whole(prompt, room, add_special_tokens)).token_ids

    async def _encode_whole(
        self, prompt: Prompt, room: PromptLimit, add_special_tokens: bool
    ) -> Encoded:
        if isinstance(prompt, MultimodalPrompt):
            encode, render = self._illustrations.encode, self._template.render
            work = partial(encode, prompt, room, add_special_tokens, self._encode, render)
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
        self._template  # noqa: B018 - here, where no thread makes a second one
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
        loop, thread = asyncio.get_running_loop(), self._template_thread
        work = partial(self._render_short, conversation, room)
        if thread is None:
            rendered = await loop.run_in_executor(self._template_executor, work)
        else:
            rendered = await thread.call(loop, work)
        if isinstance(rendered, str):  # what the template says by itself is long
            return await self._run(True, self._encode, rendered, False)
        return rendered

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of these tokens, with the special ones. Raises `RequestError`."""
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
        if self._template_thread is not None:
            self._template_thread.shutdown(wait=False)
        if "_template" in self.__dict__:
            self._template.close()

    def _least_tokens_of(self, text: str) -> int:
        num_bytes = len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))
        return num_bytes // self._max_token_bytes if self._has_tokenizer else 0

    def _least_tokens_of_messages(self, messages: Sequence[Any]) -> int:
        num_tokens = 0
        for i, message in enumerate(messages):
            if type(message) is not dict and not isinstance(message, Mapping):
                raise RequestError(
                    f'messages[{i}] must have "role" and "content", got {message!r:.80}',
                    param="messages",
                )
            for key in ("role", "content"):
                if type(message.get(key)) is str:
                    continue
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
        text = self._template.render(conversation)
        room.check(room.kept(self._least_tokens_of(unmarked(text))), "at least ")
        return text

    def _render_short(self, conversation: Conversation, room: PromptLimit) -> str | list[int]:
        """Return token ids; the text itself if it is not for this thread, as it is long."""
        text = self._render(conversation, room)
        return text if len(text) > INLINE_CHARACTERS else self._encode(text, False)

    def _render_and_encode(self, conversation: Conversation, room: PromptLimit) -> list[int]:
        return self._encode(self._render(conversation, room), add_special_tokens=False)

    def _encode_word(self, text: str) -> list[int]:
        return self._encode(text, add_special_tokens=False, field="bad_words")

    def _encode(self, text: str, add_special_tokens: bool, field: str = "prompt") -> list[int]:
        try:
            if self._marks_contents and MARK in text:
                assert self._content is not None
                ids = self._content.encode(text)
            elif self._backend is None:
                ids = list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
            elif len(text) <= SHORT_CHARACTERS:
                ids = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
            else:
                # The batch call releases the GIL; "fast" skips offsets, which are not read.
                encode = self._backend.encode_batch_fast
                ids = encode([text], add_special_tokens=add_special_tokens)[0].ids
        except (UnicodeEncodeError, TypeError) as error:  # which one, depends on the tokenizer
            what = "the prompt" if field == "prompt" else field
            raise RequestError(f"{what} is not valid Unicode: {error}", field) from error
        except BaseException as error:
            if not is_panic(error):
                raise
            what = "the prompt" if field == "prompt" else field
            why = first_line(str(error))
            raise RequestError(f"the tokenizer cannot read {what}: {why}", field) from error
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


# Sampling parameters at the engine's door: what vocabulary, tokenizer and runner allow. Knows token
# ids, and words as the tokenizer spells them. Knows nothing about prompts.


NO_TOKENIZER = "this engine has no tokenizer (skip_tokenizer_init)"
_PLAIN = SamplingParams()


class SamplingValidator:
    """Completes parameters, or raises `RequestError`."""

    def __init__(
        self,
        model_info: ModelInfo,
        seed: int,
        encode: Callable[[str], list[int]],
        decode: Callable[[list[int]], str],
        *,
        runner_info: RunnerInfo,
    ) -> None:
        """`encode` gives the token ids of a word, where there is a tokenizer, and `decode` its
        text. `seed` is where the seeds of requests without one come from.
        """
        #: Those of `params.RUNNER_PARAMETERS` that the runner serves.
        self.served = runner_info.parameters
        self._unserved = [it for it in RUNNER_PARAMETERS.items() if it[0] not in self.served]
        self._encode, self._decode = encode, decode
        self._has_tokenizer = not model_info.config.skip_tokenizer_init
        self._vocab_size = model_info.vocab_size
        self._eos_token_ids = frozenset(model_info.eos_token_ids)
        self._random = random.Random(seed)

    def complete(self, params: SamplingParams) -> SamplingParams:
        """Check token ids against the vocabulary, look bad words up in it, and give a request that
        draws a seed of its own. Raises `RequestError`.
        """
        if params.detokenize and not self._has_tokenizer:
            raise RequestError(f"{NO_TOKENIZER}: set detokenize=False", param="detokenize")
        for name, why in self._unserved:
            if getattr(params, name) != getattr(_PLAIN, name):
                raise RequestError(
                    f"{name} cannot be served: this engine's runner, or this model, {why}",
                    param=name,
                )
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            if given := getattr(params, name):
                self._check_known(name, given)
        for token_ids in params.bad_words_ids:
            self._check_known("bad_words_ids", token_ids)
        if params.bad_words:
            bad = tuple(dict.fromkeys([*params.bad_words_ids, *self._spell(params.bad_words)]))
            params = msgspec.structs.replace(params, bad_words_ids=bad, bad_words=())
        if params.thinking_budget is not None and self._has_tokenizer:
            from aioserve.engine.chat.chat_format import spell_budget

            params = spell_budget(params, self._encode, self._decode)
        if params.min_tokens and params.allowed_token_ids:
            ending = set(params.stop_token_ids)
            if not params.ignore_eos:
                ending |= self._eos_token_ids
            if ending.issuperset(params.allowed_token_ids):
                raise RequestError(
                    "allowed_token_ids holds nothing but stop tokens, and min_tokens "
                    f"({params.min_tokens}) forbids them: nothing is left",
                    param="allowed_token_ids",
                )
        if params.seed is None and not params.is_greedy:
            return params.with_checked(seed=self._random.getrandbits(62))
        return params

    def _check_known(self, name: str, token_ids: Collection[int]) -> None:
        if not (min(token_ids) >= 0 and max(token_ids) < self._vocab_size):
            unknown = next(i for i in token_ids if not 0 <= i < self._vocab_size)
            raise RequestError(
                f"{name} names token {unknown}, but the vocabulary has {self._vocab_size} tokens",
                param=name,
            )

    def _spell(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """Return how each of `words` may be said: after something else, and after a space."""
        if not self._has_tokenizer:
            raise RequestError(f"{NO_TOKENIZER}: give bad_words_ids", param="bad_words")
        spelled = []
        for word in words:
            for text in (word, f" {word.lstrip()}"):
                token_ids = tuple(self._encode(text))
                if len(token_ids) > MAX_BAD_WORD_TOKENS:
                    raise RequestError(
                        f"bad_words must have at most {MAX_BAD_WORD_TOKENS} tokens each, {text!r} "
                        f"has {len(token_ids)}",
                        param="bad_words",
                    )
                if token_ids:
                    self._check_known("bad_words", token_ids)
                    spelled.append(token_ids)
        return spelled


# Embeddings at the engine's door: what may be asked. Knows what a model says of its vectors. Knows
# nothing about states, steps or HTTP.


#: What stands for sampling parameters where a prompt is pooled.
NOTHING_SAMPLED = SamplingParams(max_tokens=1, detokenize=False, output_kind="final_only")


class PoolingValidator:
    """Completes parameters, or raises `RequestError`."""

    def __init__(self, model_info: ModelInfo, runner_info: RunnerInfo) -> None:
        """Raises `ConfigError` for a damaged file."""
        self._model_info = model_info
        self.can_pool = can_pool = runner_info.supports_pooling
        self._stated = (model_info.stated_pooling or "last") if can_pool else None

    def complete(self, params: PoolingParams) -> PoolingParams:
        """Fill in how the model pools."""
        if not self.can_pool:
            raise RequestError("this engine's runner gives no hidden states to make embeddings of")
        if params.dimensions is not None:
            self._check_dimensions(params.dimensions)
        if params.pooling is not None:
            return params
        if self._stated not in ("mean", "last"):
            raise RequestError(
                f"the model was saved to pool by {self._stated}, which is not served: give "
                "pooling (mean or last)",
                param="pooling",
            )
        return msgspec.structs.replace(params, pooling=self._stated)

    def _check_dimensions(self, dimensions: int) -> None:
        """Refuse to cut vectors of a model that was not trained for it: their beginnings mean
        nothing.
        """
        allowed = self._model_info.matryoshka_dimensions
        if not allowed:
            raise RequestError(
                "dimensions cannot be chosen: the model was not trained so that its vectors can be "
                "cut (matryoshka_dimensions or is_matryoshka in its configuration)",
                param="dimensions",
            )
        if dimensions not in allowed:
            known = f"1 to {allowed[-1]}" if isinstance(allowed, range) else str(list(allowed))
            raise RequestError(
                f"dimensions must be one of {known}, got {dimensions}", param="dimensions"
            )
