"""Compiles structured outputs to matchers, which say which tokens may come next.

By llguidance, on a thread of its own: cached by content, bounded in size, depth and time. Knows a
tokenizer; knows nothing about requests or logits.
"""

import asyncio
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from aioserve.errors import RequestError
from aioserve.model_info import ModelInfo
from aioserve.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

T = TypeVar("T")
logger = logging.getLogger(__name__)

MAX_BYTES = 1 << 18  # of what is to be compiled, as JSON
MAX_SECONDS = 10.0  # until whoever waits is refused
MAX_CACHED, MAX_CACHED_BYTES = 256, 1 << 22
# llguidance follows chains of rules by recursion and dies where the stack ends: seen at 5,000 rules
# in 8 MiB. With `MAX_BYTES`, the longest chain needs less than 256 MiB. Only what is used is taken.
STACK_BYTES = 512 << 20

#: `LLParserLimits` that differ from llguidance's own. What needs more in a step fails its request.
LIMITS: dict[str, Any] = {}

# Between the parts of JSON: what models write, and no more. Without a bound, one that is unsure
# fills its reply with blanks. As llama.cpp has it.
WHITESPACE = r" |\n[ \t]{0,20}"


class GrammarCompiler:
    """Matchers of one tokenizer. Used from several threads."""

    def __init__(self, model_info: ModelInfo) -> None:
        self._model_info = model_info
        self._tokenizer: LLTokenizer | None = None  # of the compiling thread
        self._why_not = ""  # if it can be none
        self._lock = threading.Lock()
        self._cache: OrderedDict[bytes, LLMatcher] = OrderedDict()
        self._executor: ThreadPoolExecutor | None = None

    async def prepare(self) -> None:
        """Make what all matchers share, or find out why that cannot be. To be called at the start:
        llguidance lets no other thread run meanwhile, which is a second for a large vocabulary.
        """
        if not self._model_info.eos_token_ids:
            self._why_not = "the model has no EOS token to end the text with"
            return
        try:
            await asyncio.wrap_future(self._submit(self._get_tokenizer))
        except Exception as error:  # whatever a tokenizer of somebody's own provokes
            self._why_not = f"its tokenizer cannot be read for that: {_first_line(str(error))}"
            logger.warning("structured outputs cannot be served: %s", self._why_not)

    async def check(self, wanted: StructuredOutputs) -> None:
        """Compile `wanted`. Raises `RequestError` for what cannot be, or takes too long.

        Nobody else waits meanwhile: llguidance lets other threads run.
        """
        if self._why_not:
            raise RequestError(
                f"structured_outputs cannot be served: {self._why_not}", "structured_outputs"
            )
        key = _key(wanted)
        with self._lock:
            if key in self._cache:
                return
        try:
            async with asyncio.timeout(MAX_SECONDS):
                compiled = self._submit(self._compile, key, wanted)
                await asyncio.shield(asyncio.wrap_future(compiled))
        except TimeoutError:
            raise RequestError(
                f"structured_outputs.{wanted.way} takes more than {MAX_SECONDS:g} s to compile",
                param=f"structured_outputs.{wanted.way}",
            ) from None

    def matcher(self, wanted: StructuredOutputs) -> "LLMatcher":
        """One at the beginning of its text, for `wanted` that was checked."""
        key = _key(wanted)
        with self._lock:
            compiled = self._cache.get(key)
            if compiled is not None:
                self._cache.move_to_end(key)
        if compiled is None:  # it was used so long ago that it is forgotten
            compiled = self._submit(self._compile, key, wanted).result()
        return compiled.deep_copy()

    def close(self) -> None:
        """Let the thread end. Idempotent."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)

    def _submit(self, work: Callable[..., T], *args: Any) -> "Future[T]":
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, thread_name_prefix="aioserve-grammars")
                before = threading.stack_size(STACK_BYTES)
                try:
                    self._executor.submit(int)  # starts the thread
                finally:
                    threading.stack_size(before)
            return self._executor.submit(work, *args)

    # What follows runs on the compiling thread.

    def _compile(self, key: bytes, wanted: StructuredOutputs) -> "LLMatcher":
        from llguidance import LLMatcher, LLParserLimits

        param = f"structured_outputs.{wanted.way}"
        try:
            if len(key) > MAX_BYTES:
                raise ValueError(f"has {len(key)} bytes, the limit is {MAX_BYTES}")
            grammar = _grammar(wanted)
        except (ValueError, TypeError, RecursionError) as error:
            raise RequestError(f"{param}: {_first_line(str(error))}", param=param) from error
        matcher = LLMatcher(
            self._get_tokenizer(), grammar, log_level=0, limits=LLParserLimits(**LIMITS)
        )
        if not matcher.is_error():
            matcher.compute_bitmask()  # what is made on first use is, then
        if matcher.is_error():
            raise RequestError(f"{param}: {_first_line(matcher.get_error())}", param=param)
        with self._lock:
            self._cache[key] = matcher
            while len(self._cache) > MAX_CACHED or sum(map(len, self._cache)) > MAX_CACHED_BYTES:
                self._cache.popitem(last=False)
        return matcher

    def _get_tokenizer(self) -> "LLTokenizer":
        if self._tokenizer is None:
            from llguidance.hf import from_tokenizer

            info = self._model_info
            self._tokenizer = from_tokenizer(
                info.tokenizer, n_vocab=info.vocab_size, eos_token=list(info.eos_token_ids)
            )
        return self._tokenizer


def _key(wanted: StructuredOutputs) -> bytes:
    # Not sorted: the order of properties is the order in which they are written.
    return msgspec.msgpack.encode(wanted)


def _grammar(wanted: StructuredOutputs) -> str:
    """In llguidance's terms. Raises `ValueError`."""
    from llguidance import LLMatcher, grammar_from

    options: dict[str, Any] = {"whitespace_pattern": WHITESPACE}
    if wanted.disable_any_whitespace:
        options = {"whitespace_flexible": False}
    if wanted.json_object:
        return LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=options)  # type: ignore[arg-type]
    if wanted.json is not None:
        schema = _decoded(wanted.json)
        return LLMatcher.grammar_from_json_schema(schema, overrides=options)  # type: ignore[arg-type]
    if wanted.regex is not None:
        return LLMatcher.grammar_from_regex(wanted.regex)
    if wanted.choice is not None:
        return grammar_from("choice", json.dumps(wanted.choice))
    if wanted.grammar is not None:
        return grammar_from("grammar", wanted.grammar)
    assert wanted.structural_tag is not None
    return _tags(_decoded(wanted.structural_tag))


def _decoded(given: dict[str, Any] | str) -> dict[str, Any]:
    if isinstance(given, dict):
        return given
    try:
        return msgspec.json.decode(given, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ValueError(f"no JSON object: {error}") from None


class _Structure(msgspec.Struct, forbid_unknown_fields=True):
    begin: str
    end: str
    schema: dict[str, Any]


class _StructuralTag(msgspec.Struct, forbid_unknown_fields=True):
    """As OpenAI's clients of vLLM and SGLang send it."""

    structures: list[_Structure]
    triggers: list[str]
    type: str = "structural_tag"


def _tags(given: dict[str, Any]) -> str:
    from llguidance import StructTag

    try:
        wanted = msgspec.convert(given, _StructuralTag)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None
    tags = []
    for structure in wanted.structures:
        trigger = next((t for t in wanted.triggers if t and structure.begin.startswith(t)), None)
        if trigger is None:
            raise ValueError(f"no trigger is the beginning of {structure.begin!r}")
        tags.append(
            StructTag(
                trigger=trigger,
                begin=structure.begin,
                grammar=structure.schema,
                end=structure.end,
            )
        )
    if not tags:
        raise ValueError("structures is empty")
    return StructTag.to_grammar(tags, assume_special=False)


def _first_line(text: str) -> str:
    """With where it is, if it says so, and not the whole grammar."""
    lines = text.splitlines() or [""]
    return lines[0][:300]
