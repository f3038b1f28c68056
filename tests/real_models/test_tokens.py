"""Greedy tokens, tokenizers and perplexities of trained weights, beside `transformers`."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader

from aioserve import AsyncEngine, SamplingParams
from aioserve.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    RunnerConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from aioserve.engine.detokenizer import DetokenizerChoice
from aioserve.model_source.info import ModelInfo
from tests.kit import stats_of, tokens_of
from tests.real_models.conftest import Model
from tests.real_models.reference import perplexity
from tests.real_models.vocabulary import Vocabulary
from tests.real_models.weights import MODELS

pytestmark = pytest.mark.real_models

DOCS = Path(__file__).parents[2] / "docs"
NUM_TOKENS = 24  # of a reply
SHORT = (
    *("The capital of France is", "Once upon a time", "2 + 2 =", "import numpy as np\n", "Hello"),
    *("def fibonacci(n):\n    ", "The three laws of motion are", "# A list of colours\n- red\n-"),
    *("你好世界。今天的天气", "Привет, меня зовут", "العربية لغة", "日本の首都は", "El perro"),
    *(
        "🙂🙂🙃 means",
        "SELECT name FROM",
        '{"name": "Ada", "age":',
        "<html>\n<head>",
        "a a a a a a",
    ),
    *("1, 2, 4, 8, 16,", "ABC ABC ABC ABC", "\n\n", "To be, or not to be, that is", "x"),
    *(
        "The quick brown fox jumps over the lazy dog. The quick brown fox",
        "Q: Who wrote Hamlet?\nA:",
    ),
)
LENGTHS = (30, 33, 47, 64, 65, 90, 128, 130, 160, 200, 257, 300, 350, 400, 600)  # of pieces of docs
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked": {"scheduler": SchedulerConfig(options={"chunk_size": 16})},
    "preempted": {
        "cache": CacheConfig(num_kv_blocks=64),
        "scheduler": SchedulerConfig(max_num_seqs=12),
    },
    "drafts": {"speculation": SpeculationConfig(speculative_method="ngram", prompt_lookup_min=1)},
}
ODD_TEXTS = (
    *(
        "",
        " ",
        "\n",
        "Hello, world!",
        "  two  spaces ",
        "\t\n\r\n x",
        "\n\n\n\n\n\n",
        " " * 17 + "40",
    ),
    *(
        "It's they'll I'D we've",
        "123456789 1,000.5 \uff10\uff11",
        "a" * 200,
        "\xa0\u2003x\u3000",
        "don't",
    ),
    *(
        "👩‍👩‍👧 naïve ﷽ 日本語 한국어\t\n  x  ½ 🇫🇷",
        "e\u0301 \u200f \ud7a3 𓀀",
        "\x00\x01\x7f\x1b[0m",
    ),
    *("def f(x):\n    return x**2  # ok\n", "Ελληνικά Русский العربية हिन्दी ไทย", "🙂🙂🙃", "﻿bom"),
    *(
        "İıſß ﬁ",
        "<0x41>",
        "<|im_start|>user",
        "<start_of_turn>",
        "<tool_call>{}</tool_call>",
        "<b>",
    ),
    *("<|im_ start|>", "<unused1>", "</s><s>", "x<|endoftext|>y", "a\u0300\u0301\u0302", "Ω ≠ Ω"),
    *(
        "https://a.b/c?d=e&f=%20#g",
        "\\n \\u0041 \\",
        "$x^2$ \\frac{1}{2}",
        "CamelCaseName_snake_case",
    ),
    *(
        "\uff46\uff55\uff4c\uff4c\u3000",
        "\U0001d518\U0001d52b\U0001d526",
        "\U0010ffff\ue000",
        "Zażółć gęślą jaźń",
        "ՀԱՅ ქართული",
        "ꙮ",
    ),
)


def prompts_of(model: Model) -> list[list[int]]:
    """Forty: short texts, and pieces of the docs of several lengths."""
    tokenizer = ModelInfo(ModelConfig(model=str(model.path))).tokenizer
    text = iter(tokenizer.encode(docs()))
    pieces = [[next(text) for _ in range(length)] for length in LENGTHS]
    return [*map(tokenizer.encode, SHORT), *pieces]


def docs() -> str:
    """A long text in English, with tables and code."""
    return "\n".join(page.read_text() for page in sorted(DOCS.glob("*.md")))


def config_of(model: Model, **sections: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(
            model=str(model.path), dtype="float32", max_model_len=1025, keep_prepared=False
        ),
        runner=RunnerConfig(threads=1),
        **(
            {
                "cache": CacheConfig(num_kv_blocks=2000),
                "speculation": SpeculationConfig(speculative_method="none"),
            }
            | sections
        ),
    )


def test_the_prompts_are_forty() -> None:
    assert len(SHORT) + len(LENGTHS) == 40


def test_the_file_is_of_the_model_that_it_is_said_to_be(name: str, path: Path) -> None:
    if name not in MODELS:
        pytest.skip("it is fetched as users fetch it, and other tests look at it")
    expected, reader = MODELS[name], GGUFReader(path)

    def stated(key: str) -> Any:
        return reader.fields[key].contents()

    assert stated("general.architecture") == expected.architecture
    assert stated("general.name") == expected.title
    assert stated(f"{expected.architecture}.block_count") == expected.num_layers
    assert len(stated("tokenizer.ggml.tokens")) == expected.num_tokens


@pytest.mark.parametrize("way", ["alone", "batched", "chunked", "preempted", "drafts"])
async def test_greedy_tokens_are_the_likeliest_of_transformers(model: Model, way: str) -> None:
    prompts = prompts_of(model)
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, detokenize=False)
    async with AsyncEngine(config_of(model, **ENGINES.get(way, {}))) as engine:
        if way in ("alone", "drafts"):  # of many at once few draft: it would not pay
            replies = [await tokens_of(engine, prompt, greedy) for prompt in prompts]
        else:
            asked = [tokens_of(engine, prompt, greedy) for prompt in prompts]
            replies = await asyncio.gather(*asked)
        stats = stats_of(engine)
        assert (stats.num_preemptions > 0) == (way == "preempted")
        assert (stats.num_accepted_tokens > 50) == (way == "drafts")
        ends = engine.model_info.eos_token_ids
    wrong = {
        number: found
        for number, (prompt, reply) in enumerate(zip(prompts, replies, strict=True))
        if (found := model.reference.surprises(prompt, reply))
    }
    assert not wrong
    assert all(len(reply) == NUM_TOKENS or reply[-1] in ends for reply in replies)


async def test_the_perplexity_of_twenty_thousand_tokens_is_that_of_transformers(
    model: Model,
) -> None:
    """In windows of twice the sliding window of Gemma. Both compute in float32 with the values that
    the file has, so they differ by rounding.
    """
    import torch

    tokenizer = ModelInfo(ModelConfig(model=str(model.path))).tokenizer
    ids = tokenizer.encode(docs())[:20_480]
    windows = [ids[start : start + 1024] for start in range(0, len(ids), 1024)]
    assert sum(map(len, windows)) == 20_480
    reads = SamplingParams(max_tokens=0, prompt_logprobs=0, detokenize=False)
    ours = []
    async with AsyncEngine(config_of(model)) as engine:
        for window in windows:
            async for output in engine.generate(window, reads):
                told = [entry for entry in output.prompt_logprobs or () if entry is not None]
                if told:
                    ours.append(torch.tensor([-entry.logprob for entry in told]))
    theirs = [model.reference.losses(window) for window in windows]
    assert [len(losses) for losses in ours] == [1023] * len(windows)
    found, expected = perplexity(ours), perplexity(theirs)
    print(f"{model.name}: perplexity {found:.5f}, of transformers {expected:.5f}")
    assert found == pytest.approx(expected, rel=1e-3)
    assert (
        max(float((one - other).abs().max()) for one, other in zip(ours, theirs, strict=True))
        < 0.05
    )


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Any:
    return ModelInfo(ModelConfig(model=str(path))).tokenizer


@pytest.fixture(scope="module")
def vocabulary(path: Path) -> Vocabulary:
    return Vocabulary(path)


@pytest.mark.parametrize("text", ODD_TEXTS, ids=ascii)
def test_a_text_becomes_the_tokens_that_the_tables_of_the_file_make_of_it(
    name: str, tokenizer: Any, vocabulary: Vocabulary, text: str
) -> None:
    if name == "smollm2":
        pytest.skip("it splits text in another way, which the witness does not know")
    assert tokenizer.encode(text, add_special_tokens=False) == vocabulary.encode(text)


@pytest.mark.parametrize("text", ODD_TEXTS, ids=ascii)
def test_a_text_comes_back_whole_and_in_whole_characters(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    detokenizer = DetokenizerChoice(tokenizer).choose(skip_special_tokens=False)([])
    deltas = [detokenizer.append([token]) for token in ids]
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)
