"""One architecture through the real engine: who serves it, with which tokens, or why it is refused.

Prompts in pieces, a prefix cache, preemption and prompts of mixed lengths, on the CPU, greedy, in
float32, beside `generate` of `transformers`.
"""

import asyncio
import logging
import random
from pathlib import Path
from typing import NamedTuple

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import CacheConfig, ModelConfig, RunnerConfig, SchedulerConfig
from aioserve.errors import ConfigError
from tests.architectures.tiny import VOCAB_SIZE, Case, make_config, make_model
from tests.kit import executor_of

MAX_TOKENS = 12
BLOCK_SIZE, NUM_BLOCKS = 8, 13  # what the first four prompts take, and nothing for their replies
WINDOW_BLOCKS = 200  # enough for all: who gives way does so for the other blocks
FUSED, AS_WRITTEN, ALONE, REFUSED = "fused", "as written", "one at a time", "refused"


class Outcome(NamedTuple):
    """What became of a trial."""

    served: str  # one of the four
    reason: str = ""  # why it is refused, or not served faster


def waves() -> list[list[list[int]]]:
    """Prompts that are sent together: the second wave has beginnings in common with the first."""
    rng = random.Random(3)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]

    first = [prompt(length) for length in (17, 9, 23, 40, 70, 1)]
    return [first, [first[4][:48] + prompt(7), list(first[4]), prompt(33)]]


def try_case(case: Case, path: Path) -> Outcome:
    """Raises `AssertionError` if a token is wrong, and whatever else is no refusal in one line."""
    config = make_config(case)
    config.save_pretrained(path)
    refused = asyncio.run(serve(path, []))
    if isinstance(refused, str) and "no *.safetensors weights" not in refused:
        return Outcome(REFUSED, _reason(refused, path))
    make_model(config, path)
    served = asyncio.run(serve(path, waves()))
    if isinstance(served, str):
        return Outcome(REFUSED, _reason(served, path))
    expected = reference_tokens(path)
    assert served.tokens == expected, f"{case.name}: wrong tokens"
    if served.has_windows:  # who shares memory between two pools lets fewer run than would be many
        again = asyncio.run(serve(path, waves(), num_window_blocks=WINDOW_BLOCKS))
        assert isinstance(again, Served), again
        assert again.tokens == expected, f"{case.name}: wrong tokens with room for windows"
        served = again
    assert len({token for tokens in expected for token in tokens}) > 8, "it says always the same"
    assert served.num_preemptions > 0, "the trial was too easy"
    # a state is not known behind every block
    assert served.num_prefix_hits > 0 or served.has_states, "nothing was found in the prefix cache"
    _, _, how = served.name.partition(", ")
    if how == "one request at a time":
        [reason] = served.reasons
        return Outcome(ALONE, reason)
    return Outcome({"": AS_WRITTEN, "fused": FUSED}[how])


class Served(NamedTuple):
    name: str
    tokens: list[list[int]]
    num_preemptions: int
    num_prefix_hits: int
    has_states: bool
    has_windows: bool
    reasons: list[str]  # why it is served one request at a time


async def serve(
    path: Path, prompts: list[list[list[int]]], num_window_blocks: int | None = None
) -> Served | str:
    """The tokens of each prompt, or why the engine does not start."""
    config = EngineConfig(
        model=ModelConfig(model=str(path), dtype="float32", skip_tokenizer_init=True),
        cache=CacheConfig(
            block_size=BLOCK_SIZE,
            num_kv_blocks=NUM_BLOCKS,
            num_window_blocks=num_window_blocks,
            watermark=0,
        ),
        scheduler=SchedulerConfig(
            policy="chunked_prefill", options={"chunk_size": 16}, max_num_seqs=4
        ),
        runner=RunnerConfig(threads=1),
    )
    log = _Reasons()
    logging.getLogger("aioserve.runner.loader").addHandler(log)
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True, detokenize=False)
    try:
        async with AsyncEngine(config) as engine:

            async def one(prompt: list[int]) -> list[int]:
                return [
                    token
                    async for output in engine.generate(prompt, params)
                    for token in output.token_ids
                ]

            tokens = [
                found
                for wave in prompts
                for found in await asyncio.gather(*(one(prompt) for prompt in wave))
            ]
            stats = engine.get_stats()
            assert stats is not None
            model = executor_of(engine)._model
            return Served(
                model.name,
                tokens,
                stats.num_preemptions,
                stats.num_prefix_hit_tokens,
                model.states is not None,
                stats.num_window_blocks > 0,
                log.reasons,
            )
    except ConfigError as error:
        return str(error)
    finally:
        logging.getLogger("aioserve.runner.loader").removeHandler(log)


class _Reasons(logging.Handler):
    """What the loader says of a model that is served by the slowest tier."""

    def __init__(self) -> None:
        super().__init__()
        self.reasons: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        _, found, reason = record.getMessage().partition("which is slow: ")
        if found:
            self.reasons.append(reason)


def _reason(message: str, path: Path) -> str:
    """Without what is in every one."""
    begin = "unsupported architecture "
    assert message.startswith(begin), f"refused without its name: {message}"
    assert "\n" not in message, f"more than a line: {message}"
    return message.removeprefix(begin).replace(str(path), "PATH")


def reference_tokens(path: Path) -> list[list[int]]:
    import torch

    from tests.greedy import GreedyReference

    reference = GreedyReference(path, torch.float32)
    found = []
    for wave in waves():
        for prompt in wave:
            found.append(reference.generate(prompt, MAX_TOKENS))
    return found
