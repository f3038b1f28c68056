"""From structured outputs to matchers, on a thread of its own.

By llguidance: cached by content, bounded in size, depth and time. Knows a tokenizer; knows nothing
about requests or logits.
"""

import asyncio
import logging
import threading
from collections import OrderedDict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import finalize

import msgspec

from aioserve.errors import EngineOverloadedError, RequestError
from aioserve.grammars.tokenizer import matching_tokenizer, text_tokens, with_ids
from aioserve.grammars.translation import grammar_of
from aioserve.model_info import ModelInfo
from aioserve.structured_outputs import StructuredOutputs
from aioserve.token_bytes import TokenBytes

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger(__name__)

MAX_BYTES = 1 << 18  # of what is to be compiled, as JSON
MAX_SECONDS = 10.0  # that a request waits for its grammar until it is refused
# Of all that is in use; a compiled schema takes up to some 150 times the bytes of its text.
MAX_HELD_BYTES = 1 << 23
MAX_IDLE, MAX_IDLE_BYTES = 256, 1 << 21  # kept for requests that ask for the same again
# llguidance follows chains of rules by recursion and dies where the stack ends: seen at 5,000 rules
# in 8 MiB. With `MAX_BYTES`, the longest chain needs less than 256 MiB. Only what is used is taken.
STACK_BYTES = 512 << 20

#: `LLParserLimits` that differ from llguidance's own. What needs more in a step fails its request.
LIMITS: dict[str, Any] = {}


class _Grammar:
    """One that is compiled, or waits for that: `matcher` has it, or why it cannot be."""

    __slots__ = ("key", "matcher", "num_holders")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.matcher: Future[LLMatcher | str] = Future()
        self.num_holders = 0


class GrammarCompiler:
    """Matchers of one tokenizer. Used from the event loop, but for `matcher`.

    A grammar lives as long as the `StructuredOutputs` that asked for it, and so as long as their
    requests; after that it is kept while there is room. What lives is limited at the door.
    """

    def __init__(self, model_info: ModelInfo) -> None:
        self._model_info = model_info
        self._tokenizer: LLTokenizer | None = None  # of the compiling thread
        self._text_tokens: dict[str, int] = {}
        self._why_not = ""  # if it can be none
        self._executor: ThreadPoolExecutor | None = None
        self._grammar_of: dict[int, _Grammar] = {}  # by id of the `StructuredOutputs` that hold it
        self._held: dict[bytes, _Grammar] = {}
        self._idle: OrderedDict[bytes, _Grammar] = OrderedDict()  # held by no request, oldest first
        self._num_held_bytes = self._num_idle_bytes = 0  # of their keys
        self._gone: deque[int] = deque()  # ids; filled by whichever thread lets go last

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """By token id, the bytes of a token."""
        return TokenBytes(self._model_info.tokenizer)

    async def prepare(self) -> None:
        """Make what all matchers share, or find out why that cannot be. To be called at the start:
        llguidance lets no other thread run meanwhile, which is a second for a large vocabulary.
        """
        if not self._model_info.eos_token_ids:
            self._why_not = "the model has no EOS token to end the text with"
            return
        try:
            await asyncio.wrap_future(self._thread().submit(self._get_tokenizer))
        except Exception as error:  # whatever the code of a model's tokenizer raises
            self._why_not = f"its tokenizer cannot be read for that: {_first_line(str(error))}"
            logger.warning("structured outputs cannot be served: %s", self._why_not)

    async def check(self, wanted: StructuredOutputs) -> None:
        """Compile `wanted`. Raises `RequestError` for what cannot be, or takes too long, and
        `EngineOverloadedError` if that is the others' fault.

        Other requests go on meanwhile: llguidance lets other threads run.
        """
        if self._why_not:
            raise RequestError(
                f"structured_outputs cannot be served: {self._why_not}", "structured_outputs"
            )
        param = f"structured_outputs.{wanted.way}"
        grammar = self._hold(wanted)
        try:
            async with asyncio.timeout(MAX_SECONDS):
                found = await asyncio.shield(asyncio.wrap_future(grammar.matcher))
        except TimeoutError:
            if not grammar.matcher.running():
                raise EngineOverloadedError(
                    f"other grammars have been compiled for {MAX_SECONDS:g} s"
                ) from None
            raise RequestError(
                f"{param} takes more than {MAX_SECONDS:g} s to compile", param=param
            ) from None
        if isinstance(found, str):
            raise RequestError(f"{param}: {found}", param=param)

    def matcher(self, wanted: StructuredOutputs) -> "LLMatcher":
        """One at the beginning of its text, for the very object that was checked. From any thread;
        it waits for nothing.
        """
        found = self._grammar_of[id(wanted)].matcher.result(timeout=0)
        assert not isinstance(found, str), "what cannot be compiled is refused at the door"
        return found.deep_copy()

    def close(self) -> None:
        """Let the thread end. Idempotent."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)

    def _hold(self, wanted: StructuredOutputs) -> _Grammar:
        """The grammar of `wanted`, which holds it from now on; to be compiled if it is new."""
        self._let_go()
        if (known := self._grammar_of.get(id(wanted))) is not None:
            return known
        key = _key(wanted)
        grammar = self._held.get(key)
        if grammar is None:
            if self._num_held_bytes + len(key) > MAX_HELD_BYTES:
                raise EngineOverloadedError(
                    f"structured outputs of {self._num_held_bytes} bytes are in use; {len(key)} "
                    f"more would be over {MAX_HELD_BYTES}"
                )
            grammar = self._idle.pop(key, None)
            if grammar is not None:
                self._num_idle_bytes -= len(key)
            else:
                grammar = _Grammar(key)
                self._thread().submit(self._compile, grammar)
            self._held[key] = grammar
            self._num_held_bytes += len(key)
        grammar.num_holders += 1
        self._grammar_of[id(wanted)] = grammar
        finalize(wanted, self._gone.append, id(wanted)).atexit = False
        return grammar

    def _let_go(self) -> None:
        """Grammars that lost their last holder are idle, or dropped if they wait to be compiled."""
        while self._gone:
            grammar = self._grammar_of.pop(self._gone.popleft())
            grammar.num_holders -= 1
            if grammar.num_holders:
                continue
            del self._held[grammar.key]
            self._num_held_bytes -= len(grammar.key)
            if not grammar.matcher.cancel():
                self._idle[grammar.key] = grammar
                self._num_idle_bytes += len(grammar.key)
        while len(self._idle) > MAX_IDLE or self._num_idle_bytes > MAX_IDLE_BYTES:
            key, _ = self._idle.popitem(last=False)
            self._num_idle_bytes -= len(key)

    def _thread(self) -> ThreadPoolExecutor:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="aioserve-grammars")
            before = threading.stack_size(STACK_BYTES)
            try:
                self._executor.submit(int)  # starts the thread
            finally:
                threading.stack_size(before)
        return self._executor

    # What follows runs on the compiling thread.

    def _compile(self, grammar: _Grammar) -> None:
        if grammar.matcher.set_running_or_notify_cancel():  # else no request waits for it any more
            try:
                grammar.matcher.set_result(self._compiled(grammar.key))
            except BaseException as error:
                grammar.matcher.set_exception(error)
                raise

    def _compiled(self, key: bytes) -> "LLMatcher | str":
        from llguidance import LLMatcher, LLParserLimits

        tokenizer = self._get_tokenizer()
        try:
            text = grammar_of(msgspec.json.decode(key, type=StructuredOutputs))
            text = with_ids(text, self._text_tokens)
        except (ValueError, TypeError, RecursionError) as error:
            return _first_line(str(error))
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=LLParserLimits(**LIMITS))
        if not matcher.is_error():
            matcher.compute_bitmask()  # what is made on first use is, then
        return _first_line(matcher.get_error()) if matcher.is_error() else matcher

    def _get_tokenizer(self) -> "LLTokenizer":
        if self._tokenizer is None:
            info = self._model_info
            self._tokenizer = matching_tokenizer(
                info.tokenizer, info.vocab_size, info.eos_token_ids
            )
            self._text_tokens = text_tokens(info.tokenizer, info.eos_token_ids)
        return self._tokenizer


def _key(wanted: StructuredOutputs) -> bytes:
    # Not sorted: the order of properties is the order in which they are written.
    try:
        key = msgspec.json.encode(wanted)
        if len(key) > MAX_BYTES:
            raise ValueError(f"has {len(key)} bytes, the limit is {MAX_BYTES}")
    except (ValueError, TypeError, RecursionError) as error:
        param = f"structured_outputs.{wanted.way}"
        raise RequestError(f"{param}: {error}", param=param) from error
    return key


def _first_line(text: str) -> str:
    """With where it is, if it says so, and not the whole grammar."""
    lines = text.splitlines() or [""]
    return lines[0][:300]
