"""Decoding and refusal without a server."""

import msgspec
import pytest

from aioserve.config import ImageConfig
from aioserve.errors import RequestError
from aioserve.sampling_params import SamplingParams
from aioserve.server.chat.messages import template_messages
from aioserve.server.chat.protocol import ChatCompletionRequest, ChatMessage
from aioserve.server.chat.routes import sampling_params
from aioserve.server.images import ImageParts
from aioserve.server.protocol import CompletionRequest
from aioserve.server.unserved import FOREIGN, HINTS, NOT_ON_CHAT, NOT_ON_COMPLETIONS, UNSERVED
from aioserve.server.validation import BodyDecoder

COMPLETION = BodyDecoder(CompletionRequest, NOT_ON_COMPLETIONS)
CHAT = BodyDecoder(ChatCompletionRequest, NOT_ON_CHAT)


def completion(**fields) -> CompletionRequest:
    return COMPLETION.decode(msgspec.json.encode({"prompt": "x", **fields}))


def chat(**fields) -> ChatCompletionRequest:
    return CHAT.decode(msgspec.json.encode({"messages": [], **fields}))


# Over HTTP: `stream`, `bad_words`, and what the chat template shows.
PYTHON_ONLY = {"output_kind", "bad_words_ids", "kept_special_tokens"}
PYTHON_ONLY.add("thinking_budget")  # over HTTP thinking_token_budget: a model's marks are known


def test_every_sampling_parameter_can_be_asked_for_over_http():
    for request in (CompletionRequest, ChatCompletionRequest):
        fields = set(SamplingParams.__struct_fields__) - PYTHON_ONLY
        assert fields <= set(request.__struct_fields__)


def test_no_honoured_field_is_refused():
    for request in (CompletionRequest, ChatCompletionRequest):
        for names in (UNSERVED, FOREIGN, HINTS):
            assert not set(names) & set(request.__struct_fields__)
    assert not set(NOT_ON_COMPLETIONS) & set(CompletionRequest.__struct_fields__)
    assert not set(NOT_ON_CHAT) & set(ChatCompletionRequest.__struct_fields__)


def test_every_shared_field_reaches_the_sampling_params():
    fields = {
        "n": 2,
        "min_tokens": 1,
        "truncate_prompt_tokens": -1,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 3,
        "stop": ["a", "b"],
        "include_stop_str_in_output": True,
        "stop_token_ids": [7],
        "ignore_eos": True,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.3,
        "logit_bias": {"5": -2},
        "allowed_token_ids": [5, 6],
        "bad_words": ["fie"],
        "skip_special_tokens": False,
    }
    expected = {**fields, "stop": ("a", "b"), "stop_token_ids": (7,), "logit_bias": {5: -2.0}}
    expected |= {"allowed_token_ids": (5, 6), "bad_words": ("fie",)}
    params = completion(**fields).sampling_params(max_tokens=9, logprobs=4)
    assert params == SamplingParams(**expected, max_tokens=9, logprobs=4)


def test_null_is_the_default_of_every_field():
    nulls = dict.fromkeys(set(CompletionRequest.__struct_fields__) - {"prompt", "max_tokens"})
    assert completion(**nulls) == completion()
    assert completion().sampling_params(None, None) == SamplingParams()


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("text", ["text"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_four_kinds_of_prompt_are_told_apart(prompt, prompts):
    assert completion(prompt=prompt).prompts() == prompts


def test_the_names_that_chat_uses_are_translated():
    assert sampling_params(chat()) == SamplingParams()
    assert sampling_params(chat(max_tokens=5)).max_tokens == 5
    assert sampling_params(chat(max_completion_tokens=5)).max_tokens == 5
    assert sampling_params(chat(max_tokens=5, max_completion_tokens=5)).max_tokens == 5
    assert sampling_params(chat(logprobs=False)).logprobs is None
    assert sampling_params(chat(logprobs=True)).logprobs == 0
    assert sampling_params(chat(logprobs=True, top_logprobs=3)).logprobs == 3


def test_a_name_in_a_message_reaches_the_template():
    message = ChatMessage(role="user", content="Hi", name="Will")
    expected = [{"role": "user", "content": "Hi", "name": "Will"}]
    assert template_messages([message], ImageParts(ImageConfig(), "")) == expected


def test_a_missing_field_deep_down_is_named_by_its_path():
    with pytest.raises(RequestError) as caught:
        chat(messages=[{"role": "user", "content": [{"text": "no type"}]}])
    assert caught.value.param == "messages[0].content[0].type"


def test_a_body_is_decoded_in_one_pass_whatever_it_holds(monkeypatch):
    """With what is served, what is known and asks for nothing, and hints."""
    num_passes = 0

    class Counting:
        def decode(self, body):
            nonlocal num_passes
            num_passes += 1
            return decode(body)

    decoder = BodyDecoder(CompletionRequest, NOT_ON_COMPLETIONS)
    decode = decoder._decoder.decode
    monkeypatch.setattr(decoder, "_decoder", Counting())
    monkeypatch.setattr(msgspec.json, "decode", None)
    body = {"prompt": "x", "temperature": 0.5, "tools": [], "echo": False, "metadata": {"a": "b"}}
    request = decoder.decode(msgspec.json.encode(body))
    assert (request.temperature, num_passes) == (0.5, 1)
