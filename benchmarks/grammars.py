"""What structured outputs cost: two libraries side by side, and masks in the engine.

    pip install llguidance xgrammar
    python benchmarks/grammars.py libraries --model embedded [DIRECTORY]
    python benchmarks/grammars.py libraries --train 150000 TEXT...   # on a vocabulary made here
    python benchmarks/grammars.py masks [--model ../135m] [--streams 64] [--rounds 3]

`libraries`: for each of the schemas in schemas.json: compile it, then walk through a random text
that satisfies it, with a mask at every token. Milliseconds and microseconds, one thread.

`masks`: microseconds per masked row, and tokens per second of 64 streams. Free and masked streams
take turns on one engine, as many tokens each. `text` allows nearly every token, `records` is a list
of JSON objects: much of it is forced, and goes in fewer steps. Neither ends before its tokens do.
Medians. The last line is JSON.
"""

import asyncio
import json
import random
import resource
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from harness import Args, Opt, Program, ratio, turns
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import ModelConfig, RunnerConfig
from aioserve.features.grammars import GrammarCompiler
from aioserve.features.grammars.rows import GrammarRows
from aioserve.model_source.info import ModelInfo
from aioserve.params import StructuredOutputs

program = Program(__doc__)

SCHEMAS: dict[str, Any] = json.loads((Path(__file__).parent / "schemas.json").read_text("utf-8"))
MOST_TOKENS = 300


class Walk(Protocol):
    """Somewhere in a text that follows a grammar."""

    def mask(self) -> np.ndarray: ...
    def take(self, token_id: int) -> bool: ...
    def is_over(self) -> bool: ...


class Library(Protocol):
    """One way to do it."""

    def compile(self, schema: str) -> Walk: ...


class LLGuidance:
    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        from llguidance import LLMatcher
        from llguidance.hf import from_tokenizer

        self._matcher, self._vocab_size = LLMatcher, vocab_size
        self._tokenizer = from_tokenizer(tokenizer, n_vocab=vocab_size)

    def compile(self, schema: str) -> Walk:
        grammar = self._matcher.grammar_from_json_schema(schema)
        matcher = self._matcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error().splitlines()[0])
        return LLGuidanceWalk(matcher, self._vocab_size)


class LLGuidanceWalk:
    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._words = np.zeros((1, -(-vocab_size // 32)), dtype=np.int32)

    def mask(self) -> np.ndarray:
        self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        return self._words

    def take(self, token_id: int) -> bool:
        return bool(self._matcher.consume_token(token_id))

    def is_over(self) -> bool:
        return bool(self._matcher.is_stopped())


class XGrammar:
    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        import xgrammar

        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
        self._module, self._vocab_size = xgrammar, vocab_size
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, schema: str) -> Walk:
        compiled = self._compiler.compile_json_schema(schema, any_whitespace=True)
        return XGrammarWalk(self._module, self._module.GrammarMatcher(compiled), self._vocab_size)


class XGrammarWalk:
    def __init__(self, module: Any, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._words = module.allocate_token_bitmask(1, vocab_size)

    def mask(self) -> np.ndarray:
        self._matcher.fill_next_token_bitmask(self._words)
        words: np.ndarray = self._words.numpy()
        return words

    def take(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))

    def is_over(self) -> bool:
        return bool(self._matcher.is_terminated())


def random_walk(walk: Walk, vocab_size: int, seed: int) -> list[int]:
    """Token ids of a text that the grammar allows, drawn evenly among the allowed ones."""
    rng, token_ids = random.Random(seed), list[int]()
    while not walk.is_over() and len(token_ids) < MOST_TOKENS:
        bits = np.unpackbits(walk.mask().view(np.uint8), bitorder="little")[:vocab_size]
        token_ids.append(int(rng.choice(np.flatnonzero(bits))))
        if not walk.take(token_ids[-1]):
            raise ValueError(f"{token_ids[-1]} was allowed and is refused")
    return token_ids


def measure(library: Library, texts: dict[str, list[int]]) -> dict[str, Any]:
    """Compile every schema and walk through its text."""
    compiled, masks, refused, broken = {}, list[float](), {}, list[str]()
    firsts = list[float]()
    for name, schema in SCHEMAS.items():
        start = time.perf_counter()
        try:
            walk = library.compile(json.dumps(schema))
        except Exception as error:
            refused[name] = str(error).splitlines()[0][:100]
            continue
        compiled[name] = (time.perf_counter() - start) * 1e3
        for place, token_id in enumerate(texts.get(name, [])):
            if walk.is_over():
                break
            start = time.perf_counter()
            walk.mask()
            (masks if place else firsts).append((time.perf_counter() - start) * 1e6)
            if not walk.take(token_id):
                broken.append(name)
                break
    masks.sort()
    return {
        "compile_ms": [
            round(statistics.median(compiled.values()), 2),
            round(max(compiled.values()), 1),
        ],
        "slowest": max(compiled, key=lambda name: compiled[name]),
        "first_mask_us": [round(statistics.median(firsts)), round(max(firsts))],
        "mask_us": [
            round(statistics.fmean(masks), 1),
            round(masks[len(masks) // 2], 1),
            round(masks[int(len(masks) * 0.99)]),
            round(masks[-1]),
        ],
        "refused": refused,
        "disagrees": broken,
    }


def trained(size: int, files: list[str]) -> Any:
    """A tokenizer of bytes with `size` entries."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train(files, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def tokenizers_of(args: Args) -> Iterator[tuple[str, Any, int]]:
    for model in args.model:
        info = ModelInfo(ModelConfig(model=model))
        yield model, info.tokenizer, info.vocab_size
    if args.train:
        size = int(args.train[0])
        tokenizer = trained(size, args.train[1:])
        yield f"trained, {len(tokenizer)}", tokenizer, len(tokenizer)


@program.command(
    "libraries",
    model=Opt([], "models whose vocabularies are taken"),
    train=Opt([], "a size and texts, for a vocabulary that is made here"),
    library=Opt(str, "one alone, for memory", ["llguidance", "xgrammar"]),
)
def libraries(args: Args) -> dict[str, Any]:
    """Measure llguidance beside xgrammar on the same grammars."""
    results: dict[str, Any] = {}
    for name, tokenizer, vocab_size in tokenizers_of(args):
        texts: dict[str, list[int]] = {}
        for library_name, make in (("llguidance", LLGuidance), ("xgrammar", XGrammar)):
            if args.library not in (None, library_name):
                continue
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            start = time.perf_counter()
            library = make(tokenizer, vocab_size)
            seconds = time.perf_counter() - start
            if not texts:
                for schema_name, schema in SCHEMAS.items():
                    walk = library.compile(json.dumps(schema))
                    texts[schema_name] = random_walk(walk, vocab_size, 1)
            found = measure(library, texts) | {"tokenizer_s": round(seconds, 3)}
            found["mib"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
            results[f"{name} {library_name}"] = found
            print(f"{name}, {library_name}")
            for key, value in found.items():
                print(f"  {key:14} {value}")
    return results


# Masks in the engine.


RECORD = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 30},
        "scene": {"type": "integer", "minimum": 1, "maximum": 9},
        "speakers": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 1},
    },
    "required": ["title", "scene", "speakers"],
    "additionalProperties": False,
}
WAYS = {
    "text": StructuredOutputs(regex=r"[^\x00]{3000}"),
    "records": StructuredOutputs(json={"type": "array", "items": RECORD, "minItems": 1000}),
}


async def tokens_per_second(
    engine: AsyncEngine, way: StructuredOutputs | None, streams: int, tokens: int, seed: int
) -> float:
    async def one(index: int) -> None:
        params = SamplingParams(
            max_tokens=tokens,
            temperature=1.0,
            seed=seed + index,
            structured_outputs=way,
            ignore_eos=way is None,
        )
        stream = await engine.add_request(f"{index}. Once", params)
        async for _ in stream:
            pass

    start = time.perf_counter()
    await asyncio.gather(*(one(index) for index in range(streams)))
    return streams * tokens / (time.perf_counter() - start)


async def serve(args: Args) -> dict[str, list[float]]:
    config = EngineConfig(
        model=ModelConfig(model=args.model), runner=RunnerConfig(threads=args.threads)
    )
    rates: dict[str, list[float]] = {}
    async with AsyncEngine(config) as engine:
        for turn, name in turns(["free", *WAYS], args.rounds + 1):
            way = WAYS.get(name)
            rate = await tokens_per_second(engine, way, args.streams, args.tokens, turn * 1000)
            if turn:  # the first one compiles
                rates.setdefault(name, []).append(rate)
    return rates


async def microseconds(args: Args) -> dict[str, dict[str, float]]:
    """Of the runner's steps, by row: the mask, the token that is taken, what is forced next."""
    info = ModelInfo(ModelConfig(model=args.model))
    compiler = GrammarCompiler(info)
    found = {}
    for name, way in WAYS.items():
        await compiler.check(way)
        rows = GrammarRows(compiler, info.vocab_size, info.eos_token_ids)
        every = np.arange(args.streams)
        for row in every.tolist():
            rows.rows[row] = compiler.matcher(way)
        spent = {"mask": 0.0, "token": 0.0, "forced": 0.0}
        rng = np.random.default_rng(0)
        for _ in range(args.tokens):
            start = time.perf_counter()
            started = rows.begin(every, {})
            assert started is not None
            masks = started.take(every, may_sit_out=False)
            spent["mask"] += time.perf_counter() - start
            allowed = masks.allowed(info.vocab_size)
            chosen = [[int(rng.choice(np.flatnonzero(own)))] for own in allowed]
            start = time.perf_counter()
            rows.append(every, chosen, {})
            spent["token"] += time.perf_counter() - start
            start = time.perf_counter()
            for row in every.tolist():
                rows.guesses(row)
            spent["forced"] += time.perf_counter() - start
        rows.close()
        count = args.streams * args.tokens
        found[name] = {key: round(seconds / count * 1e6, 1) for key, seconds in spent.items()}
    compiler.close()
    return found


@program.command("masks", model="embedded", streams=64, tokens=100, rounds=3, threads=int)
def masks(args: Args) -> dict[str, Any]:
    """Masked streams, beside free ones."""
    result: dict[str, Any] = {"us_per_row": asyncio.run(microseconds(args))}
    for name, parts in result["us_per_row"].items():
        print(f"{name:8} us per row and step: {parts}")
    rates = asyncio.run(serve(args))
    for name, values in rates.items():
        rate, share = statistics.median(values), ratio(values, rates["free"])
        result[name] = {"tokens_per_s": round(rate), "to_free": share, "rates": values}
        print(f"{name:8} {rate:8.0f} tokens/s, {share:.2f} of free")
    return result


if __name__ == "__main__":
    program.main()
