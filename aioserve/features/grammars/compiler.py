"""From structured outputs to matchers, on a thread of its own.

By llguidance: tried in another process first (`trial`), cached by content, bounded in memory, depth
and time. Knows a tokenizer; knows nothing about requests or logits.
"""

import asyncio
import logging
import threading
from collections import OrderedDict, deque
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import finalize

import msgspec

from aioserve.config import StructuredOutputsConfig
from aioserve.errors import EngineOverloadedError, RequestError, first_line
from aioserve.model_source.info import ModelInfo
from aioserve.params import StructuredOutputs
from aioserve.runner.interface import OutputCompiler
from aioserve.support.tokens import TokenBytes

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from aioserve.features.grammars.trial import Setup, Trials, Verdict

logger = logging.getLogger(__name__)

MAX_BYTES = 1 << 18  # of what is to be compiled, as JSON
MAX_SECONDS = 10.0  # that a request waits for its grammar until it is refused
# That it waits before for the process of trials, which is started once: a vocabulary of 262,144
# tokens takes five seconds of processor time there.
START_SECONDS = 120.0
# Of memory that the grammars in use take together, and those that are kept for requests that ask
# for the same again: as their trials measured it, and as their text is long until then.
MAX_HELD_BYTES = 1 << 26
MAX_IDLE, MAX_IDLE_BYTES = 256, 1 << 24
LEAST_BYTES = 1 << 14  # a small grammar takes memory that was free already
MAX_TRIALS = 2  # at once
# llguidance follows chains of rules by recursion and dies where the stack ends: seen at 5,000 rules
# in 8 MiB. The engine's compiling thread has twice this.
STACK_BYTES = 32 << 20

#: `LLParserLimits` that differ from llguidance's own: an order of magnitude smaller, and ten times
#: what schemas of hundreds of fields need. A grammar that needs more is refused, or ends its reply.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 100_000,
    "step_lexer_fuel": 50_000,
    "step_max_items": 20_000,
    "max_lexer_states": 25_000,
    "max_grammar_size": 50_000,
}


class Grammar:
    """One that is compiled, or waits for that: `matcher` has it, or why it cannot be."""

    __slots__ = ("__weakref__", "key", "matcher", "num_bytes", "num_holders", "verdict")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.matcher: Future[LLMatcher | str] = Future()
        self.num_holders = 0
        self.num_bytes = LEAST_BYTES + len(key)  # that it counts for
        self.verdict: Verdict | None = None


class Traits(NamedTuple):
    """The traits of a compiled grammar that are known before a text follows it."""

    grammar: object  # the same for all that ask for the same
    num_copy_bytes: int  # of memory that a matcher takes beside the others
    is_slow: bool  # masks, or calls that hold the GIL, take long


class GrammarCompiler(OutputCompiler):
    """Matchers of one tokenizer. Used from the event loop, but for `matcher`.

    A grammar lives as long as the `StructuredOutputs` that asked for it, and so as long as their
    requests; after that it is kept while there is room. What lives is limited at the door.
    """

    def __init__(
        self, model_info: ModelInfo, settings: StructuredOutputsConfig | None = None
    ) -> None:
        """`settings` are those of the engine; None: the defaults."""
        self._model_info, self._settings = model_info, settings or StructuredOutputsConfig()
        self._tokenizer: LLTokenizer | None = None  # of the compiling thread
        self._why_not = ""  # if it can be none
        self._executor: ThreadPoolExecutor | None = None
        self._grammar_of: dict[int, Grammar] = {}  # by id of the `StructuredOutputs` that hold it
        self._held: dict[bytes, Grammar] = {}
        self._idle: OrderedDict[bytes, Grammar] = OrderedDict()  # held by no request, oldest first
        self._num_held_bytes = self._num_idle_bytes = 0
        self._trials: Trials | None = None
        self._trying: ThreadPoolExecutor | None = None
        self._started: Future[None] = Future()  # done when the first trial has ended
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
            self._why_not = f"its tokenizer cannot be read for that: {first_line(str(error))}"
            logger.warning("structured outputs cannot be served: %s", self._why_not)

    async def check(self, wanted: StructuredOutputs) -> None:
        """Compile `wanted`. Raises `RequestError` for what cannot be, takes too long or too much
        memory, or ends the process in which it is tried, and `EngineOverloadedError` if that is
        the others' fault.

        Other requests go on meanwhile: llguidance lets other threads run.
        """
        if self._why_not:
            raise RequestError(
                f"structured_outputs cannot be served: {self._why_not}", "structured_outputs"
            )
        param = f"structured_outputs.{wanted.way}"
        grammar = self._hold(wanted)
        matcher = asyncio.wrap_future(grammar.matcher)
        try:
            async with asyncio.timeout(START_SECONDS):
                await asyncio.wait(
                    (matcher, asyncio.wrap_future(self._started)),
                    return_when=asyncio.FIRST_COMPLETED,
                )
            async with asyncio.timeout(MAX_SECONDS):
                found = await asyncio.shield(matcher)
        except TimeoutError:
            # Its trial bounds the processor time that it takes, so it is not to blame for this.
            raise EngineOverloadedError(
                f"the machine had no time to compile {param} within {MAX_SECONDS:g} s"
            ) from None
        if isinstance(found, str):
            raise RequestError(f"{param}: {found}", param=param)
        self._weigh(grammar)

    def matcher(self, wanted: StructuredOutputs) -> "LLMatcher":
        """Return one at the beginning of its text, for the very object that was checked. From any
        thread; it waits for nothing.
        """
        found = self._grammar_of[id(wanted)].matcher.result(timeout=0)
        assert not isinstance(found, str), "what cannot be compiled is refused at the door"
        return found.deep_copy()

    def traits(self, wanted: StructuredOutputs) -> "Traits":
        """Return what its trial has shown of the very object that was checked. From any thread."""
        grammar = self._grammar_of[id(wanted)]
        assert grammar.verdict is not None, "it was tried"
        return Traits(grammar, grammar.verdict.num_copy_bytes, grammar.verdict.is_slow)

    def close(self) -> None:
        """Let the threads end, and the process of trials. Idempotent."""
        for executor in (self._executor, self._trying):
            if executor is not None:
                executor.shutdown(wait=False, cancel_futures=True)
        if self._trials is not None:
            self._trials.close()

    def _hold(self, wanted: StructuredOutputs) -> Grammar:
        """Return the grammar of `wanted`, which holds it from now on; to be compiled if it is
        new.
        """
        self._let_go()
        if (known := self._grammar_of.get(id(wanted))) is not None:
            return known
        key = _key(wanted)
        grammar = self._held.get(key)
        if grammar is None:
            grammar = self._idle.pop(key, None)
            if grammar is not None:
                self._num_idle_bytes -= grammar.num_bytes
            else:
                grammar = Grammar(key)
                self._check_room(grammar.num_bytes)
                self._trial_threads().submit(self._try, grammar)
            self._held[key] = grammar
            self._num_held_bytes += grammar.num_bytes
        grammar.num_holders += 1
        self._grammar_of[id(wanted)] = grammar
        finalize(wanted, self._gone.append, id(wanted)).atexit = False
        return grammar

    def _weigh(self, grammar: Grammar) -> None:
        """Count a grammar that was compiled for what it takes. Raises `EngineOverloadedError` if
        that is too much beside those in use.
        """
        assert grammar.verdict is not None, "it was tried"
        num_bytes = max(grammar.num_bytes, grammar.verdict.num_bytes)
        more, grammar.num_bytes = num_bytes - grammar.num_bytes, num_bytes
        self._num_held_bytes += more
        if more:
            self._check_room(0)

    def _check_room(self, num_bytes: int) -> None:
        if self._num_held_bytes + num_bytes > MAX_HELD_BYTES:
            raise EngineOverloadedError(
                f"structured outputs that take {self._num_held_bytes} bytes of memory are in use; "
                f"the limit is {MAX_HELD_BYTES}"
            )

    def _let_go(self) -> None:
        """Grammars that lost their last holder are idle; they are dropped if they wait to be
        compiled, or cannot be.
        """
        while self._gone:
            grammar = self._grammar_of.pop(self._gone.popleft())
            grammar.num_holders -= 1
            if grammar.num_holders:
                continue
            del self._held[grammar.key]
            self._num_held_bytes -= grammar.num_bytes
            if not grammar.matcher.cancel() and _is_good(grammar.matcher):
                if grammar.verdict is not None:
                    grammar.num_bytes = max(grammar.num_bytes, grammar.verdict.num_bytes)
                self._idle[grammar.key] = grammar
                self._num_idle_bytes += grammar.num_bytes
        while len(self._idle) > MAX_IDLE or self._num_idle_bytes > MAX_IDLE_BYTES:
            _, grammar = self._idle.popitem(last=False)
            self._num_idle_bytes -= grammar.num_bytes

    def _make_setup(self) -> "Setup":
        from aioserve.features.grammars.trial import Setup

        info = self._model_info
        backend = copy(info.tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        eos = list(info.eos_token_ids)
        tokenizer, settings = backend.to_str(), self._settings
        return Setup(tokenizer, info.vocab_size, eos, LIMITS, STACK_BYTES, settings=settings)

    def _trial_threads(self) -> ThreadPoolExecutor:
        if self._trying is None:
            from aioserve.features.grammars.trial import Trials

            self._trials = Trials(self._make_setup)
            self._trying = ThreadPoolExecutor(MAX_TRIALS, "aioserve-grammar-trials")
        return self._trying

    def _thread(self) -> ThreadPoolExecutor:
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="aioserve-grammars")
            before = threading.stack_size(2 * STACK_BYTES)
            try:
                self._executor.submit(int)  # starts the thread
            finally:
                threading.stack_size(before)
        return self._executor

    # What follows runs on threads of trials.

    def _try(self, grammar: Grammar) -> None:
        if not grammar.matcher.set_running_or_notify_cancel():
            return  # no request waits for it any more
        try:
            assert self._trials is not None, "made before this thread"
            grammar.verdict = verdict = self._trials.run(grammar.key)
            if verdict.error:
                grammar.matcher.set_result(verdict.error)
            else:
                self._thread().submit(self._compile, grammar, verdict.text)
        except Exception as error:  # told to the requests that wait
            grammar.matcher.set_exception(error)
        finally:
            with suppress(InvalidStateError):  # an earlier trial has found it there
                self._started.set_result(None)

    # What follows runs on the compiling thread.

    def _compile(self, grammar: Grammar, text: str) -> None:
        try:
            grammar.matcher.set_result(self._compiled(text))
        except BaseException as error:
            grammar.matcher.set_exception(error)
            raise

    def _compiled(self, text: str) -> "LLMatcher | str":
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(**LIMITS)
        matcher = LLMatcher(self._get_tokenizer(), text, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()  # what is made on first use is, then
        return first_line(matcher.get_error()) if matcher.is_error() else matcher

    def _get_tokenizer(self) -> "LLTokenizer":
        if self._tokenizer is None:
            from aioserve.features.grammars.tokenizer import matching_tokenizer

            info = self._model_info
            self._tokenizer = matching_tokenizer(
                info.tokenizer, info.vocab_size, info.eos_token_ids
            )
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


def _is_good(matcher: "Future[LLMatcher | str]") -> bool:
    """Return whether it is a matcher, or may become one: failures are not kept."""
    if not matcher.done():
        return True
    return matcher.exception() is None and not isinstance(matcher.result(), str)
