"""Grammars and stop strings that cost what nobody pays for: targets with bounds on memory and time.

A whole engine runs each case beside a stream of another request. Beside what every target promises,
the loop of the engine never stands still for long, the other stream goes on, and what a case takes
is given back. Times are the less of time and processor time, so that a busy machine finds nothing.
"""

import asyncio
import contextlib
import json
import time
from abc import abstractmethod
from pathlib import Path
from typing import Any

import msgspec
import psutil

from aioserve.config import CacheConfig, EngineConfig, ModelConfig, RunnerConfig, SchedulerConfig
from aioserve.engine import AsyncEngine
from aioserve.errors import RequestError, RequestFailedError
from aioserve.params import SamplingParams, StructuredOutputs
from tests.fuzz.harness import Target
from tests.processes import PATIENCE

MIB = 2.0**20
TICK = 0.005  # seconds between two looks at the clocks, on the loop
# What a case may take, and all cases together may keep. Of grammars in use 64 MiB are allowed to
# all requests and 16 MiB are kept of others; allocators keep as much again.
MOST_CASE_MIB, MOST_KEPT_MIB = 160.0, 160.0
MOST_CHILDREN_MIB = 320.0  # of the processes that try grammars
# Seconds; a step of the model takes a millisecond, and a regex of 24 KB held the loop for 2.
MOST_STILL, MOST_GAP = 1.0, 2.5
CASE_SECONDS = 45.0  # in which each request ends, however busy the machine is


class Stopwatch:
    """The longest time between two laps: the less of time and of the process's processor time."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._last = time.monotonic(), time.process_time()

    def lap(self) -> None:
        now = time.monotonic(), time.process_time()
        passed = min(one - other for one, other in zip(now, self._last, strict=True))
        self.longest = max(self.longest, passed)
        self._last = now


class Bounded(Target):
    """A case is asked of an engine with the embedded model, three times beside each other."""

    num_seen = 0  # cases
    most_mib = longest_still = longest_gap = 0.0  # of all cases

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._process = psutil.Process()
        self._others = set(self._process.children(recursive=True))  # what other tests have left
        self._runner = asyncio.Runner()
        self._engine = self._runner.run(self._start())
        for _ in range(2):  # what the first one alone takes
            with contextlib.suppress(AssertionError):
                self._runner.run(self._case(self.usual()))
        self._first_mib = self._resident()

    @abstractmethod
    def usual(self) -> SamplingParams:
        """A case that is good."""

    @abstractmethod
    def wanted(self, kind: str, text: str) -> SamplingParams:
        """What a case asks. Raises `RequestError` if it asks for nothing that makes sense."""

    async def _start(self) -> AsyncEngine:
        config = EngineConfig(
            model=ModelConfig(max_model_len=512),
            runner=RunnerConfig(threads=1),
            cache=CacheConfig(num_kv_blocks=600),
            scheduler=SchedulerConfig(max_num_seqs=24),
        )
        engine = AsyncEngine(config)
        await engine.start()
        return engine

    def read(self, kind: str, data: bytes) -> None:
        params = self.wanted(kind, data.decode(errors="replace"))
        self.num_seen += 1
        self._runner.run(self._case(params))

    async def _case(self, params: SamplingParams) -> None:
        """Raises `AssertionError` for a bound that is not held."""
        _forget_peak()
        before = self._resident()
        still, gap = Stopwatch(), Stopwatch()
        beside = [
            asyncio.create_task(self._look(still)),
            asyncio.create_task(self._other(gap)),
        ]
        try:
            async with asyncio.timeout(CASE_SECONDS):
                found = await asyncio.gather(
                    *(self._ask(params) for _ in range(3)), return_exceptions=True
                )
        except TimeoutError:
            raise AssertionError(f"does not end in {CASE_SECONDS:g} s") from None
        finally:
            still.lap()
            for task in beside:
                task.cancel()
            told = await asyncio.gather(*beside, return_exceptions=True)
        wrong = [it for it in told if isinstance(it, Exception)]
        assert not wrong, f"the request beside it got {wrong[0]!r}"
        taken = _peak() - before
        self.most_mib = max(self.most_mib, taken)
        self.longest_still = max(self.longest_still, still.longest)
        self.longest_gap = max(self.longest_gap, gap.longest)
        assert taken < MOST_CASE_MIB, f"takes {taken:.0f} MiB"
        assert still.longest < MOST_STILL, f"holds the loop for {still.longest:.2f} s"
        assert gap.longest < MOST_GAP, f"holds the other stream for {gap.longest:.2f} s"
        children = self._children()
        assert children < MOST_CHILDREN_MIB, f"processes of the engine take {children:.0f} MiB"
        for error in found:
            assert type(error) is not RequestFailedError, f"fails within: {error}"
            if isinstance(error, BaseException):
                raise error

    async def _ask(self, params: SamplingParams) -> None:
        async with contextlib.aclosing(self._engine.generate("x", params)) as outputs:
            async for _ in outputs:
                pass

    async def _look(self, still: Stopwatch) -> None:
        while True:
            await asyncio.sleep(TICK)
            still.lap()

    async def _other(self, gap: Stopwatch) -> None:
        """A stream without an end, which has nothing to do with the case."""
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        while True:
            async with contextlib.aclosing(self._engine.generate("once", params)) as outputs:
                async for _ in outputs:
                    gap.lap()

    def _held(self) -> int:
        stats = self._engine.get_stats()
        assert stats is not None
        return stats.num_used_kv_blocks

    def _resident(self) -> float:
        return float(self._process.memory_info().rss / MIB)

    def _children(self) -> float:
        taken = 0.0
        for child in {*self._process.children(recursive=True)} - self._others:
            with contextlib.suppress(psutil.Error):
                taken += child.memory_full_info().uss / MIB
        return taken

    def close(self) -> None:
        async def end() -> None:
            for _ in range(int(PATIENCE / TICK)):
                if not (held := self._held()):
                    break
                await asyncio.sleep(TICK)
            await self._engine.shutdown()
            assert not held, f"{held} KV blocks are held after all requests"

        kept = self._resident() - self._first_mib
        self.told = (
            f"at most {self.most_mib:.0f} MiB for a case, {kept:.0f} MiB kept, the loop held for "
            f"{self.longest_still:.2f} s, the other stream for {self.longest_gap:.2f} s"
        )
        try:
            self._runner.run(end())
        finally:
            self._runner.close()
        assert kept < MOST_KEPT_MIB, f"{self.num_seen} cases keep {kept:.0f} MiB"


class Constrained(Bounded):
    """A text that replies are bound to."""

    field: str
    good: tuple[str, ...]

    def seeds(self) -> list[bytes]:
        return [f"{self.field}\n{text}".encode() for text in self.good]

    def usual(self) -> SamplingParams:
        return self.wanted(self.field, self.good[0])

    def wanted(self, kind: str, text: str) -> SamplingParams:
        outputs = StructuredOutputs(**{kind: text})
        return SamplingParams(max_tokens=12, n=4, seed=1, structured_outputs=outputs)


class Regexes(Constrained):
    """Patterns."""

    name, field = "regexes", "regex"
    words = (
        b"{100}",
        b"{1,1000}",
        b"(a|b)*",
        b"(?:",
        b")*",
        b"a?",
        b"\\p{L}",
        b"[^x]",
        b".*",
        b"){99}",
    )
    words += (
        b"(?=x)",
        b"\\b",
        b"(?i)",
        b"\\w+\\s",
        b"(.{0,50}a){20}",
        b"(\\d{9}){99}",
        b"[\\s\\S]",
        b"|",
    )
    good = (
        r"(\d{3}-)?[a-z]+(foo|bar)*\s?\p{Lu}{2,5}",
        r"(?i)[\w.+-]+@[\w-]+\.[a-z]{2,9}",
        r"(a|b)*a(a|b){9}",
        r"([01]?\d|2[0-3]):[0-5]\d(:[0-5]\d)?",
        r"(((d{100}){100}){100})",
        "a?" * 400 + "b",
        r"(.*x){12}",
        r"(\w+\s){1,200}\.",
    )


class Schemas(Constrained):
    """JSON schemas."""

    name, field = "schemas", "json"
    words = (b'"$ref": "#"', b'"pattern": "(a|b)*"', b'"minItems": 99999', b'"maxLength": 100000')
    words += (
        b'"anyOf": [',
        b'"allOf": [',
        b'"oneOf": [',
        b'"uniqueItems": true',
        b'"$defs"',
        b"1e99",
    )
    words += (b'"patternProperties": {".*": ', b'"additionalProperties": ', b'"multipleOf": 0.001')
    words += (
        b'"minimum": -9223372036854775809',
        b'"format": "date-time"',
        b'"not": {}',
        b'"enum": [',
    )
    good = tuple(
        json.dumps(schema)
        for schema in (
            {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "minimum": 1, "maximum": 99, "multipleOf": 3},
                    "b": {"type": "string", "pattern": "^[a-z]{1,9}$", "maxLength": 5},
                    "c": {"type": "array", "items": {"$ref": "#/$defs/x"}, "minItems": 1},
                    "d": {"anyOf": [{"const": 5}, {"enum": ["x", None]}, {"format": "date-time"}]},
                },
                **{"required": ["a"], "additionalProperties": False},
                "$defs": {"x": {"allOf": [{"type": "number"}, {"exclusiveMinimum": 0.5}]}},
            },
            {"type": "array", "items": {"type": "string", "maxLength": 2000}, "maxItems": 500},
            {"properties": {f"k{number}": {"type": "string"} for number in range(60)}},
            {"enum": [f"word {number}" for number in range(300)]},
            {
                "$ref": "#/$defs/t",
                "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}},
            },
            {"anyOf": [{"properties": {"a": {"const": number}}} for number in range(30)]},
            {"type": "object", "patternProperties": {"^a+$": {"type": "integer"}}},
            {"type": "number", "minimum": -(2**70), "maximum": 2**70},
        )
    )


class Larks(Constrained):
    """Grammars, as Lark and GBNF write them."""

    name, field = "larks", "grammar"
    words = (
        b"start: ",
        b"root ::= ",
        b"%json {}",
        b"<[5]>",
        b"a: a a | b",
        b"{1,1000}",
        b"/.*/",
        b"|",
    )
    words += (
        b'"x"?',
        b"%ignore /\\s+/",
        b"(a b)*",
        b"~ 1..99",
        b"%regex {}",
        b"a{50}",
        b'("y" | )',
    )
    good = (
        'start: a | "x" b\na: /[0-9]+/ "," a?\nb: "y" | <[5]> | %json {"type":"null"}',
        'root ::= "a" b* | [^x-z]+\nb ::= ("c" | "d")? "e"{1,3} # x\n',
        'start: e\ne: e "+" e | e "*" e | "(" e ")" | /[0-9]+/\n',
        "start: a\n"
        + "".join(f"a{n}: a{n + 1} a{n + 1}\n" for n in range(12)).replace("a0", "a")
        + 'a12: "x"\n',
        "start: " + " ".join(['"a"?'] * 200) + "\n",
        'start: s*\ns: "a" s "b" | "a" s | \n',
        "start: /(a|b)*a(a|b){12}/ /x{1,500}/\n",
        "root ::= ws item+\nitem ::= [a-z]+ ws\nws ::= [ \\t\\n]*\n",
    )


class Stops(Bounded):
    """Stop strings and bad words, and what a reply may be made of, as fields of a request."""

    name = "stops"
    words = (
        b'"stop": ',
        b'"bad_words": ',
        b'"allowed_token_ids": [69]',
        b'"logit_bias": {"69": 100}',
    )
    words += (
        b'"include_stop_str_in_output": true',
        b'"n": 4',
        b'"min_tokens": 50',
        b"a" * 2000,
        b'"logprobs": 3',
    )

    def seeds(self) -> list[bytes]:
        allowed = {"allowed_token_ids": [69]}  # one letter again and again
        held = ["a" * 3000 + "z", *(f"b{chr(65 + number)}" + "a" * 3000 for number in range(31))]
        cases: list[dict[str, Any]] = [
            {"stop": ["\n\n", "king", "the "], "temperature": 1.0},
            {"stop": held, "logit_bias": {"68": 100}, "temperature": 0},
            {"stop": held, **allowed, "n": 4},
            {"stop": ["ab" * 500 + "c", "ba" * 500 + "c"], "allowed_token_ids": [68, 69]},
            {"bad_words": ["a", "aa", "aaa", "the", " "], "n": 2, "logprobs": 2},
            {"stop": "x", "include_stop_str_in_output": True, "min_tokens": 20},
            {
                "stop_token_ids": list(range(100, 400)),
                "stop": ["\ufffd"],
                "skip_special_tokens": False,
            },
        ]
        return [b"fields\n" + json.dumps(case).encode() for case in cases]

    def usual(self) -> SamplingParams:
        return self.wanted("fields", '{"stop": ["king"]}')

    def wanted(self, kind: str, text: str) -> SamplingParams:
        limits = {"max_tokens": 150, "seed": 1, "ignore_eos": True}
        try:
            fields = json.loads(text)
            if not isinstance(fields, dict) or fields.get("structured_outputs"):
                raise RequestError("no fields")
            fields["n"] = min(4, fields.get("n", 1))  # or one case takes a minute
            return msgspec.convert({**fields, **limits}, SamplingParams, strict=False)
        except (msgspec.ValidationError, ValueError, TypeError, RecursionError) as error:
            raise RequestError(" ".join(str(error).split()) or "no fields") from error


BOUNDED = (Regexes, Schemas, Larks, Stops)


def _forget_peak() -> None:
    """Let `_peak` begin anew, where the kernel can."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def _peak() -> float:
    """The most that was resident since, in MiB."""
    with open("/proc/self/status") as file:
        (line,) = (line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024
