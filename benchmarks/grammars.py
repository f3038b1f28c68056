"""Two libraries for structured outputs, side by side: what do they cost, what do they refuse?

    pip install llguidance xgrammar
    python benchmarks/grammars.py --model embedded [--model DIRECTORY]
    python benchmarks/grammars.py --train 150000 TEXT...   # on a vocabulary of this size, made here

For each of the schemas in schemas.json: compile it, then walk through a random text that satisfies
it, with a mask at every token. Milliseconds and microseconds, one thread. The last line is JSON.
"""

import argparse
import json
import random
import resource
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from aioserve.config import ModelConfig
from aioserve.model_source.info import ModelInfo

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
    """A tokenizer of bytes with so many entries."""
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


def tokenizers_of(args: argparse.Namespace) -> Iterator[tuple[str, Any, int]]:
    for model in args.model:
        info = ModelInfo(ModelConfig(model=model))
        yield model, info.tokenizer, info.vocab_size
    if args.train:
        size = int(args.train[0])
        tokenizer = trained(size, args.train[1:])
        yield f"trained, {len(tokenizer)}", tokenizer, len(tokenizer)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", action="append", default=[])
    parser.add_argument("--train", nargs="+", metavar=("SIZE", "TEXT"), default=[])
    parser.add_argument(
        "--library", choices=["llguidance", "xgrammar"], help="one alone, for memory"
    )
    args = parser.parse_args()
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
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
