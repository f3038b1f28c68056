"""Decoding and refusal without a server."""

import re

import msgspec
import pytest

from aioserve.apis import anthropic, responses
from aioserve.config import ImageConfig
from aioserve.errors import RequestError
from aioserve.params import SamplingDefaults, SamplingParams
from aioserve.server.body import BodyDecoder
from aioserve.server.chat.protocol import ChatCompletionRequest, ChatMessage, template_messages
from aioserve.server.chat.routes import sampling_params
from aioserve.server.fields import GENERATING
from aioserve.server.images import ImageParts
from aioserve.server.protocol import SHARED_SAMPLING_FIELDS, CompletionRequest
from tests.server.bad_bodies import good_numbers

COMPLETION = BodyDecoder(CompletionRequest, "completions")
CHAT = BodyDecoder(ChatCompletionRequest, "chat")


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


DECODERS = {
    "completions": COMPLETION,
    "chat": CHAT,
    "responses": responses.decoder,
    "messages": anthropic.create_decoder,
}


def test_what_one_route_serves_is_known_on_all_routes_that_generate():
    assert DECODERS.keys() == set(GENERATING)
    served = {name for each in DECODERS.values() for name in each.served.__struct_fields__}
    for route, each in DECODERS.items():
        known = {*each.served.__struct_fields__, *each.hints, *each.unserved, *each.skipped}
        assert served <= known, route


def test_what_is_sent_instead_of_a_refused_field_is_served_there_or_names_its_route():
    for route, each in DECODERS.items():
        for name, rule in each.unserved.items():
            found = re.fullmatch(r"(\w+)(\.\w+)?", rule.instead)
            if found is not None:
                assert found[1] in each.served.__struct_fields__, (route, name)


def test_every_sampling_parameter_can_be_asked_for_on_every_route_that_generates():
    fields = set(SHARED_SAMPLING_FIELDS) - {"n", "prompt_logprobs", "detokenize"}
    assert {"stop", "seed", "top_k", "structured_outputs"} <= fields
    for each in DECODERS.values():
        assert fields <= set(each.served.__struct_fields__)


def test_every_shared_field_reaches_the_sampling_params():
    fields = {
        **good_numbers(),
        "stop": ["a", "b"],
        "include_stop_str_in_output": True,
        "stop_token_ids": [7],
        "ignore_eos": True,
        "logit_bias": {"5": -2},
        "allowed_token_ids": [5, 6],
        "bad_words": ["fie"],
        "skip_special_tokens": False,
    }
    contrary = {"structured_outputs", "detokenize"}  # to some of these
    assert fields.keys() == set(SHARED_SAMPLING_FIELDS) - contrary
    expected = {**fields, "stop": ("a", "b"), "stop_token_ids": (7,), "logit_bias": {5: -2.0}}
    expected |= {"allowed_token_ids": (5, 6), "bad_words": ("fie",)}
    params = completion(**fields).sampling_params(max_tokens=9, logprobs=4)
    assert params == SamplingParams(**expected, max_tokens=9, logprobs=4)


def test_what_bodies_ask_for_alike_is_checked_once_and_nothing_else_is_shared():
    fields = {"max_tokens": 7, "temperature": 0.5, "ignore_eos": True}
    first = sampling_params(chat(**fields))
    assert sampling_params(chat(**fields)) is first
    assert sampling_params(chat(**fields), kept_special_tokens=(3,)).kept_special_tokens == (3,)
    assert sampling_params(chat(**fields | {"max_tokens": 8})).max_tokens == 8
    recommended = SamplingDefaults(top_k=5)
    assert sampling_params(chat(**fields), recommended).top_k == 5
    assert sampling_params(chat(temperature=0.5), default_max_tokens=9).max_tokens == 9
    assert sampling_params(chat(temperature=0.5), default_max_tokens=6).max_tokens == 6
    for other in ({"seed": 1}, {"stop": "x"}, {"logit_bias": {"3": 1.0}}, {"stop_token_ids": [3]}):
        told = [sampling_params(chat(**fields, **other)) for _ in range(2)]
        assert told[0] == told[1]
        assert told[0] is not told[1], other  # a cache of what clients send has no bounds
    for _ in range(2):
        with pytest.raises(RequestError, match="temperature must be"):
            sampling_params(chat(temperature=3.0))


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

    decoder = BodyDecoder(CompletionRequest, "completions")
    decode = decoder._decoder.decode
    monkeypatch.setattr(decoder, "_decoder", Counting())
    monkeypatch.setattr(msgspec.json, "decode", None)
    body = {"prompt": "x", "temperature": 0.5, "tools": [], "echo": False, "metadata": {"a": "b"}}
    request = decoder.decode(msgspec.json.encode(body))
    assert (request.temperature, num_passes) == (0.5, 1)


def test_no_known_name_hides_what_a_struct_can_do():
    for route, each in DECODERS.items():
        rules = {*each.hints, *each.unserved, *each.skipped}
        assert not [name for name in rules if hasattr(each.served, name)], route
