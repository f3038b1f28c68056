"""POST /v1/chat/completions over a real socket."""

from typing import Any

import pytest

from aioserve import SamplingParams, params
from aioserve.server import protocol


async def test_a_chat_completion_has_the_shape_of_openai(server):
    answer = await server.chat(max_completion_tokens=5, ignore_eos=True)
    body = answer.json()
    assert answer.status == 200
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    [choice] = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"]
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    assert body["usage"]["completion_tokens"] == 5


async def test_each_choice_of_a_stream_opens_with_the_role(server):
    answer = await server.chat(max_tokens=4, n=2, stream=True, ignore_eos=True)
    deltas = {0: [], 1: []}
    for event in answer.events():
        assert event["object"] == "chat.completion.chunk"
        for choice in event["choices"]:
            deltas[choice["index"]].append(choice["delta"])
    for first, *rest in deltas.values():
        assert first == {"role": "assistant", "content": ""}
        assert rest
        assert all(set(delta) == {"content"} for delta in rest)


async def test_a_stream_tells_the_same_text_as_a_whole_response(server):
    whole = (await server.chat(max_tokens=30)).json()["choices"][0]
    events = (await server.chat(max_tokens=30, stream=True)).events()
    choices = [event["choices"][0] for event in events]
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    assert text == whole["message"]["content"]
    assert choices[-1]["finish_reason"] == whole["finish_reason"]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_sampling_parameters_of_a_chat_are_checked_once(server, stream, monkeypatch):
    checked = []
    check = params._check_types

    def noted(given: SamplingParams) -> dict[str, Any]:
        checked.append(given)
        return check(given)

    monkeypatch.setattr(params, "_check_types", noted)
    protocol._kept_params.cache_clear()
    for _ in range(2):  # and not again for another that asks for the same
        answer = await server.chat(max_tokens=2, temperature=0.5, stream=stream)
        assert answer.status == 200
    assert [given.temperature for given in checked] == [0.5]
    assert (await server.chat(temperature=3)).json()["error"]["param"] == "temperature"


async def test_without_a_limit_a_reply_runs_to_its_own_end(server):
    choice = (await server.chat("To be or not to be")).json()["choices"][0]
    assert choice["finish_reason"] == "stop"


async def test_a_reply_can_go_on_with_the_last_message(server):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Good"}]
    tokenizer = server.engine.model_info.tokenizer
    text = tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    ids = tokenizer.encode(text, add_special_tokens=False)
    plain = (await server.complete(ids, max_tokens=8)).json()
    body = {"messages": messages, "continue_final_message": True, "max_tokens": 8}
    answer = (await server.request("POST", "/v1/chat/completions", json=body)).json()
    assert answer["choices"][0]["message"]["content"] == plain["choices"][0]["text"]
    assert answer["usage"] == plain["usage"] | {
        "prompt_tokens_details": answer["usage"]["prompt_tokens_details"]
    }
    refused = await server.chat(chat_template_kwargs={"enable_thinking": True})
    assert refused.json()["error"]["param"] == "chat_template_kwargs.enable_thinking"
    refused = await server.chat(chat_template="{{ messages }}")
    assert refused.json()["error"]["param"] == "chat_template"


async def test_text_parts_are_joined(server):
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]
    plain = (await server.chat("Hello there", max_tokens=8)).json()
    joined = (await server.chat(parts, max_tokens=8)).json()
    assert joined["choices"] == plain["choices"]
    assert joined["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]


async def test_developer_is_another_name_of_system(server):
    texts = []
    for role in ("system", "developer"):
        messages = [{"role": role, "content": "Be brief."}, {"role": "user", "content": "Hi"}]
        answer = await server.request(
            "POST", "/v1/chat/completions", json={"messages": messages, "max_tokens": 8}
        )
        texts.append(answer.json()["choices"][0]["message"]["content"])
    assert texts[0] == texts[1]


async def test_a_reply_can_be_sent_back_as_it_came(server):
    reply = (await server.chat(max_tokens=8)).json()["choices"][0]["message"]
    replayed = {**reply, "refusal": None, "tool_calls": None, "function_call": None, "audio": None}
    messages = [{"role": "user", "content": "Hi"}, replayed, {"role": "user", "content": "So?"}]
    answer = await server.request(
        "POST", "/v1/chat/completions", json={"messages": messages, "max_tokens": 4}
    )
    assert answer.status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_name_tokens_bytes_and_alternatives(server, stream):
    fields = {"max_tokens": 5, "logprobs": True, "top_logprobs": 3, "ignore_eos": True}
    answer = await server.chat(stream=stream, **fields)
    chunks = answer.events() if stream else [answer.json()]
    entries, text = [], ""
    for chunk in chunks:
        for choice in chunk["choices"]:
            entries += (choice["logprobs"] or {"content": []})["content"]
            text += choice["delta"].get("content", "") if stream else choice["message"]["content"]
    assert len(entries) == 5
    assert "".join(entry["token"] for entry in entries) == text
    for entry in entries:
        # A token may be part of a character: the string shows a mark, the bytes are the truth.
        assert bytes(entry["bytes"]).decode(errors="replace") == entry["token"]
        assert entry["logprob"] <= 0
        assert entry["top_logprobs"][0].keys() == {"token", "logprob", "bytes"}


async def test_logprobs_without_alternatives_are_the_sampled_tokens_alone(server):
    answer = await server.chat(max_tokens=2, logprobs=True, ignore_eos=True)
    content = answer.json()["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in content] == [[], []]
