"""Prompts that are asked about: vLLM's `prompt_logprobs`, OpenAI's `echo` with `logprobs`."""

from pathlib import Path

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

import aioserve
from aioserve.config import EngineConfig, ModelConfig, RunnerConfig
from tests.server.serving import running

EMBEDDED = Path(aioserve.__file__).parent / "model_source" / "embedded"

IDS = [5, 6, 7, 8]
SHOWN = [None, *({str(i): {"logprob": 0.0, "rank": 1}} for i in IDS[1:])]


def shown(prompt_logprobs):
    """vLLM's shape without the tokens' texts."""
    return prompt_logprobs and [
        position
        and {
            i: {k: v for k, v in entry.items() if k != "decoded_token"}
            for i, entry in position.items()
        }
        for position in prompt_logprobs
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_completions_tell_prompts_in_the_shape_of_vllm(server, stream):
    fields = {"prompt_logprobs": 1, "n": 2, "max_tokens": 3, "ignore_eos": True, "stream": stream}
    answer = await server.complete([IDS, IDS[:1]], **fields)
    told = {}
    for chunk in answer.events() if stream else [answer.json()]:
        for choice in chunk["choices"]:
            if "prompt_logprobs" in choice:
                assert told.setdefault(choice["index"], choice["prompt_logprobs"])
    texts = [entry["decoded_token"] for position in told[0][1:] for entry in position.values()]
    tokenizer = server.engine.model_info.tokenizer
    assert texts == [tokenizer.decode([token_id]) for token_id in IDS[1:]]
    found = {index: shown(position) for index, position in told.items()}
    # In a stream it is told once: with the first delta of a prompt's first choice.
    expected = {0: SHOWN, 1: SHOWN, 2: [None], 3: [None]}
    assert found == ({0: SHOWN, 2: [None]} if stream else expected)


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f"}}]])
async def test_chats_tell_the_rendered_prompt_once(start_server, tools):
    parser = {"tool_call_parser": "hermes"}
    fields = {"prompt_logprobs": 0, "max_tokens": 3, "ignore_eos": True, "tools": tools}
    async with start_server(server=parser) as server:
        whole = (await server.chat(**fields)).json()
        events = (await server.chat(stream=True, **fields)).events()
        alone = (await server.chat(**fields | {"max_tokens": 0})).json()
    assert len(whole["prompt_logprobs"]) == whole["usage"]["prompt_tokens"]
    assert [e["prompt_logprobs"] for e in events if "prompt_logprobs" in e] == [
        whole["prompt_logprobs"]
    ]
    assert alone["prompt_logprobs"] == whole["prompt_logprobs"]
    [choice] = alone["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    assert alone["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("max_tokens", [0, 3])
@pytest.mark.parametrize("prompt", ["Who's there? 🙂 Nay!", [5, 6, 7, 300, 1, 9]])
async def test_an_echo_with_logprobs_covers_prompt_and_completion(server, prompt, max_tokens):
    fields = {"echo": True, "logprobs": 1, "max_tokens": max_tokens, "ignore_eos": True}
    body = (await server.complete(prompt, **fields)).json()
    [choice] = body["choices"]
    told, num_tokens = choice["logprobs"], body["usage"]["total_tokens"]
    assert [len(column) for column in told.values()] == [num_tokens] * 4
    assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
    assert told["token_logprobs"][1:] == [0.0] * (num_tokens - 1)
    assert all(
        list(top) == [t]
        for top, t in zip(told["top_logprobs"][1:], told["tokens"][1:], strict=True)
    )
    ends = [*told["text_offset"][1:], len(choice["text"])]
    for token, begin, end in zip(told["tokens"], told["text_offset"], ends, strict=True):
        is_whole = "\N{REPLACEMENT CHARACTER}" not in token
        assert choice["text"][begin:end] == token or (begin == end) or not is_whole
    if isinstance(prompt, str):
        assert choice["text"].startswith(prompt)
    assert "prompt_logprobs" not in choice  # that was not asked for
    columns = {name: [] for name in told}
    for event in (await server.complete(prompt, stream=True, **fields)).events():
        for name, column in (event["choices"][0]["logprobs"] or {}).items():
            columns[name] += column
    assert columns == told


async def test_an_echo_of_a_prompt_that_is_cut_is_what_was_kept(server):
    fields = {"echo": True, "max_tokens": 0, "truncate_prompt_tokens": 2}
    [choice] = (await server.complete("Who's there?", logprobs=0, **fields)).json()["choices"]
    assert choice["text"] == "".join(choice["logprobs"]["tokens"])
    assert len(choice["logprobs"]["tokens"]) == 2
    [choice] = (await server.complete("Who's there?", **fields)).json()["choices"]
    assert choice["logprobs"] is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "logprobs": 1}, "max_tokens"),
        ({"max_tokens": 0, "echo": True, "n": 2}, "n"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 1, "n": 2, "stream": True}, "echo"),
    ],
)
async def test_what_cannot_be_told_is_refused(server, fields, param):
    answer = await server.complete(**fields)
    assert (answer.status, answer.json()["error"]["param"]) == (400, param)


def harness_reads(body, context_lengths):
    """As the `local-completions` of lm-evaluation-harness reads an answer."""
    for choice, begin in zip(
        sorted(body["choices"], key=lambda choice: choice["index"]), context_lengths, strict=True
    ):
        values = choice["logprobs"]["token_logprobs"][begin:-1]
        tops = choice["logprobs"]["top_logprobs"][begin:-1]
        is_greedy = all(v == max(top.values()) for v, top in zip(values, tops, strict=True))
        yield sum(values), is_greedy


# The loop is the subject of other tests; these load a model each.
@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_the_evaluation_harness_and_openai_read_what_transformers_computes():
    config = EngineConfig(model=ModelConfig(dtype="float32"), runner=RunnerConfig(threads=1))
    async with running(config) as server:
        info = server.engine.model_info
        model = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32).eval()
        encode = info.tokenizer.encode
        pairs = [("To be, or", " not to be"), ("What news, my", " lord"), ("Nay, é🙂", "é🙃")]
        contexts = [encode(context) for context, _ in pairs]
        prompts = [c + encode(own) for c, (_, own) in zip(contexts, pairs, strict=True)]
        with torch.inference_mode():
            rows = [model(torch.tensor([p])).logits[0].log_softmax(-1) for p in prompts]
        # one whose continuation is what the model would say
        contexts.append(prompts[0])
        prompts.append([*prompts[0], int(rows[0][-1].argmax())])
        rows.append(torch.cat([rows[0], rows[0][-1:]]))
        asked = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
        body = (await server.complete(prompts, model="embedded", **asked)).json()
        async with openai.AsyncOpenAI(
            base_url=server.url + "/v1", api_key="none", max_retries=0
        ) as client:
            completion = await client.completions.create(
                model="embedded",
                prompt=prompts[0],
                max_tokens=0,
                echo=True,
                logprobs=1,
                extra_body={"prompt_logprobs": 2},
            )
    found = list(harness_reads(body, map(len, contexts)))
    for (value, is_greedy), prompt, context, row in zip(
        found, prompts, contexts, rows, strict=True
    ):
        own = range(len(context), len(prompt))
        assert value == pytest.approx(sum(float(row[at - 1][prompt[at]]) for at in own), abs=1e-3)
        assert is_greedy == all(int(row[at - 1].argmax()) == prompt[at] for at in own)
    assert found[-1][1]
    [choice] = completion.choices
    first = body["choices"][0]["logprobs"]
    assert choice.logprobs.token_logprobs == pytest.approx(first["token_logprobs"][:-1])
    assert choice.logprobs.text_offset == first["text_offset"][:-1]
    told = choice.model_extra["prompt_logprobs"]
    for i, token_id in enumerate(prompts[0][1:], start=1):
        assert told[i][str(token_id)]["logprob"] == choice.logprobs.token_logprobs[i]
        assert len(told[i]) in (2, 3)
