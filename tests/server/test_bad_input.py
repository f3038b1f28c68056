"""Whatever a client sends, it gets a 4xx that names the field, and the server goes on."""

import asyncio
import gzip
import io
import json
from itertools import zip_longest

import pytest

from aioserve.server.fields import FIELDS
from aioserve.server.routes import all_routes
from tests.server.bad_bodies import BIG, WRONG, bad_numbers, check, mutations, thinned
from tests.slow import mostly_slow

COMPLETION = {"prompt": "Hello", "max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}

SAMPLING = [
    *bad_numbers(),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": BIG}, "max_tokens"),
    ({"min_tokens": 3}, "min_tokens"),
    ({"temperature": 1e39}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": BIG}, "temperature"),
    ({"seed": "x"}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"stop": 5}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a", 1]}, "stop[1]"),
    ({"stop": ["a"] * 33}, "stop"),
    ({"stop": "a" * 16_385}, "stop"),
    ({"stop": ["a" * 8193, "b" * 8192]}, "stop"),
    ({"stop_token_ids": [5] * 1025}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"bad_words": ["  "]}, "bad_words"),
    ({"bad_words": [["a"]]}, "bad_words[0]"),
    ({"allowed_token_ids": [10**9]}, "allowed_token_ids"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"999999999": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"ignore_eos": "yes"}, "ignore_eos"),
    ({"priority": "high"}, "priority"),
    ({"user": 5}, "user"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"model": 5}, "model"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        "response_format.json_schema.name",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format.json_schema.schema",
    ),
    ({"response_format": {"type": "text", "triggers": []}}, "response_format.triggers"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.format"),
    (
        {"response_format": {"type": "structural_tag", "structures": []}},
        "response_format.triggers",
    ),
    (
        {"response_format": {"type": "structural_tag", "format": {}, "structures": []}},
        "response_format.triggers",
    ),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "response_format",
    ),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
    ({"guided_json": {}}, "guided_json"),
]

COMPLETION_ONLY = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["fine", ""]}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {"text": "x"}}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt"),
    ({"prompt": [[1], 5]}, "prompt"),
    ({"prompt": [[1, "a"]]}, "prompt[0][1]"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**9]}, "prompt"),
    ({"prompt": ["a"] * 2000}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"best_of": 4, "stream": True}, "best_of"),
    ({"best_of": 2, "n": 3}, "best_of"),
    ({"best_of": 129}, "best_of"),
    ({"suffix": "and so on"}, "suffix"),
]

CHAT_ONLY = [
    ({"messages": []}, "messages"),
    ({"messages": "Hello"}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].image_url.url",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].image_url",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        "messages[0].content[0]",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
    ),
    ({"messages": [{"role": "user", "content": "word " * 20_000}]}, "messages"),
    ({"logprobs": 5}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
    ({"max_tokens": None, "max_completion_tokens": 5, "min_tokens": 9}, "min_tokens"),
]


async def refuse_all(server, path, base, cases):
    for change, param in cases:
        answer = await server.request("POST", path, json={**base, **change})
        assert answer.status == 400, (change, answer)
        error = check(answer)
        assert error["param"] == param, (change, error)
        assert error["type"] == "invalid_request_error"
    assert (await server.request("POST", path, json=base)).status == 200
    assert set((await server.gauges()).values()) == {0}


@pytest.mark.parametrize(
    ("path", "base", "cases"),
    [
        ("/v1/completions", COMPLETION, SAMPLING + COMPLETION_ONLY),
        ("/v1/chat/completions", CHAT, SAMPLING + CHAT_ONLY),
    ],
    ids=["completions", "chat"],
)
async def test_a_bad_field_is_a_400_that_names_its_path(server, path, base, cases):
    await refuse_all(server, path, base, cases)


MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
# A good body of every route that takes one: its example, or one with as much inside as mutations
# should reach.
SCORED = {"query": "a", "items": ["b", "c"], "label_token_ids": [5, 6], "apply_softmax": True}
RANKED = {"query": "a", "documents": ["b", {"text": "c"}], "top_n": 1, "return_documents": False}
GOOD = {
    **{route.path: dict(route.example) for route in all_routes() if route.example},
    "/v1/completions": {**COMPLETION, "logit_bias": {"5": 1}, "stop": ["a"], "n": 1},
    "/v1/chat/completions": {
        **CHAT,
        "messages": MESSAGES,
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "/tokenize": {"messages": MESSAGES, "return_token_strs": True},
    "/detokenize": {"tokens": [5, 6], "model": "embedded"},
    "/v1/messages": {
        "model": "embedded",
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": MESSAGES,
        "max_tokens": 2,
        "stop_sequences": ["a"],
        "metadata": {"user_id": "ann"},
        "output_config": {"format": None},
    },
    "/v1/responses": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}],
        "max_output_tokens": 2,
        "metadata": {"a": "b"},
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "none"},
    },
    "/v1/responses/input_tokens": {"input": "Hello", "instructions": "Be brief."},
    "/v1/messages/count_tokens": {"messages": MESSAGES, "system": "Be brief."},
    "/v1/embeddings": {
        "input": [[5, 6], [7]],
        "encoding_format": "float",
        "pooling": "mean",
        "normalize": True,
        "truncate_prompt_tokens": 3,
        "user": "ann",
    },
    **{path: SCORED for path in ("/score", "/v1/score")},
    **{path: RANKED for path in ("/rerank", "/v1/rerank", "/v2/rerank")},
}


@pytest.fixture
async def reranker(start_server):
    """A server that asks its model for scores, whatever it says."""
    scoring = {"score_template": "qwen3_reranker", "score_labels": "no,What"}
    async with start_server(scoring=scoring) as server:
        yield server


ENOUGH = 100  # bodies of one route with something wrong


def bad_bodies(good):
    """`good` with one thing wrong at every place; where that is too little, with two at once."""
    bodies = [*mutations(good)]
    if len(bodies) < ENOUGH:
        for name in good:
            bodies += [{**good, name: a, "model": b} for a in WRONG for b in WRONG]
    return [json.dumps(body).encode() for body in bodies]


DECODERS = {route.path: route.body for route in all_routes() if route.body is not None}


def test_every_route_with_a_body_is_given_bad_ones():
    assert GOOD.keys() == DECODERS.keys()


# By another name, in `make test-all` alone.
ALIASES = ("/score", "/rerank", "/v1/rerank")


@pytest.mark.parametrize("path", mostly_slow(GOOD, but=GOOD.keys() - set(ALIASES)))
async def test_whatever_is_wrong_with_a_body_it_is_refused_in_words_and_the_next_is_served(
    reranker, path
):
    server = reranker
    good = GOOD[path]
    served = (await server.request("POST", path, json=good)).status
    bodies = bad_bodies(good)
    enough, bodies = max(ENOUGH, len(bodies) // 2) / len(bodies), thinned(bodies)
    num_refused = 0
    for body in [*bodies, *MALFORMED]:
        answer = await server.request("POST", path, data=body)
        assert answer.status in (200, 400, 404), (body, answer)
        if answer.status != 200:
            num_refused += 1
            check(answer, answer.status)
    assert num_refused > enough * len(bodies)
    assert (await server.request("POST", path, json=good)).status == served
    assert set((await server.gauges()).values()) == {0}


UNSERVED = [path for path, decoder in DECODERS.items() if decoder.unserved]


@pytest.mark.parametrize("path", mostly_slow(UNSERVED, but=set(UNSERVED) - set(ALIASES)))
async def test_fields_that_are_not_served_are_refused_by_name_unless_they_ask_for_nothing(
    reranker, path
):
    server = reranker
    base, decoder = GOOD[path], DECODERS[path]
    for name, field in decoder.unserved.items():
        answer = await server.request("POST", path, json={**base, name: "something"})
        error = check(answer)
        assert error.get("param", name) == name
        assert f"{name} is not supported" in error["message"]
        assert field.instead in error["message"]
    asked = {
        name
        for name, field in decoder.unserved.items()
        if any(no_op is True for no_op in field.no_ops) and False not in field.no_ops
    }
    for name in asked:
        answer = await server.request("POST", path, json={**base, name: False})
        assert answer.status == 400, (name, answer)
    objects = ("nvext", "kv_hints", "vllm_xargs")
    quiet = [{name: None for name in decoder.unserved}]
    quiet += [{name: False for name in decoder.unserved if name not in asked}]
    quiet += [{name: {} if name in objects else {"a": ["b"]} for name in decoder.hints}]
    for values in zip_longest(*(field.no_ops for field in decoder.unserved.values())):
        quiet.append(dict(zip(decoder.unserved, values, strict=True)))
    for fields in quiet:
        answer = await server.request("POST", path, json={**base, **fields})
        assert answer.status == 200, (fields, answer)


async def test_a_value_that_only_resembles_false_is_refused(server):
    for name, value in [("use_beam_search", 0), ("echo", 1), ("tools", [{}])]:
        assert check(await server.complete(**{name: value}))["param"] == name


LIKE_ERRORS = [
    "unknown field `",
    "missing required field `x`",
    " - at `$.model`",
    "unknown field `x` - at `$.y`",
]


async def test_a_value_that_is_worded_like_an_error_is_not_read_as_one(server):
    for text in LIKE_ERRORS:
        body = {**CHAT, "messages": [{"role": 100 * text, "content": "x"}]}
        answer = await server.request("POST", "/v1/chat/completions", json=body)
        assert check(answer)["param"] == "messages[0].role"


UNKNOWN = [
    ({"tempratur": 0.5}, "tempratur", "did you mean 'temperature'?"),
    ({"max_token": 5}, "max_token", "did you mean 'max_tokens'?"),
    ({"ignore_eso": None}, "ignore_eso", "did you mean 'ignore_eos'?"),
    ({"zzz": [1]}, "zzz", "unknown field 'zzz'"),
    ({"x" * 10_000: 1}, "x" * 64, "unknown field"),
    ({"`~ at `$.x": 1}, "`~ at `$.x", "unknown field"),
    ({"stream": True, "stream_options": {"include_usag": 1}}, "stream_options.include_usag", ""),
]
UNKNOWN_IN_CHAT = [
    ({"messages": [{"role": "user", "content": "x", "nam": "y"}]}, "messages[0].nam", "'name'"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "txt": "y"}]}]},
        "messages[0].content[0].txt",
        "'text'",
    ),
]


@pytest.mark.parametrize(
    ("path", "base", "cases"),
    [
        ("/v1/completions", COMPLETION, UNKNOWN),
        ("/v1/chat/completions", CHAT, UNKNOWN + UNKNOWN_IN_CHAT),
    ],
    ids=["completions", "chat"],
)
async def test_an_unknown_field_is_a_400_that_names_it_and_the_nearest(server, path, base, cases):
    for change, param, message in cases:
        error = check(await server.request("POST", path, json={**base, **change}))
        assert (error["param"], error["code"]) == (param, "unknown_parameter")
        assert message in error["message"]
        assert len(error["message"]) < 200


@pytest.mark.parametrize(
    ("path", "base", "cases"),
    [
        ("/v1/completions", COMPLETION, UNKNOWN),
        ("/v1/chat/completions", CHAT, UNKNOWN),
    ],
    ids=["completions", "chat"],
)
async def test_unknown_fields_can_be_ignored_and_those_that_ask_for_something_still_cannot(
    start_server, path, base, cases
):
    async with start_server(server={"ignore_unknown_fields": True}) as server:
        for change, _, _ in cases:
            answer = await server.request("POST", path, json={**base, **change})
            assert answer.status == 200, answer
        refused = DECODERS[path].unserved
        for name in (name for name in refused if FIELDS[name].is_foreign):
            answer = await server.request("POST", path, json={**base, name: "x", "zzz": 1})
            assert answer.status == 200, answer
        for name in (name for name in refused if not FIELDS[name].is_foreign):
            answer = await server.request("POST", path, json={**base, name: "x", "zzz": 1})
            assert check(answer)["param"] == name
        answer = await server.request("POST", path, json={**base, "temperature": "x", "zzz": 1})
        assert check(answer)["param"] == "temperature"
        bias = {"logit_bias": {"7": 1.5}, "zzz": 1}
        assert (await server.request("POST", path, json={**base, **bias})).status == 200
        part = {"type": "text", "text": "x", "cache_control": {}}
        message = {"role": "user", "content": [part], "id": 7}
        assert (await server.chat(messages=[message], max_tokens=2)).status == 200


async def test_what_is_known_in_a_message_but_not_served_must_be_empty(server):
    empty = {"tool_calls": [], "refusal": None, "annotations": [], "audio": None, "reasoning": ""}
    message = {"role": "assistant", "content": "x", **empty}
    assert (await server.chat(messages=[message], max_tokens=2)).status == 200
    for name in ("refusal", "tool_call_id"):
        answer = await server.chat(messages=[{**message, name: "something"}])
        assert check(answer)["param"] == f"messages[0].{name}"
    part = {"type": "text", "text": "x", "image_url": {"url": "y"}}
    answer = await server.chat([part])
    assert check(answer)["param"] == "messages[0].content[0].image_url"


MALFORMED = [
    b"",
    b"{",
    b"nonsense",
    b"[]",
    b"5",
    b'"text"',
    b"\xff\xfe",
    b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x"} trailing',
    b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_missing_field_is_named(server, path):
    error = check(await server.request("POST", path, json={"model": "embedded"}))
    assert error["param"] == ("prompt" if path == "/v1/completions" else "messages")


async def test_an_unknown_model_is_a_404_with_its_code(server):
    for answer in (
        await server.complete(model="gpt-4o"),
        await server.chat(model="gpt-4o"),
        await server.get("/v1/models/gpt-4o"),
    ):
        error = check(answer, 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "gpt-4o" in error["message"]
        assert "embedded" in error["message"]


async def test_a_prompt_that_is_too_long_is_told_both_lengths(start_server):
    async with start_server(model={"max_model_len": 64}) as server:
        error = check(await server.complete([5] * 80))
        assert "80" in error["message"]
        assert "64" in error["message"]


async def test_other_paths_and_methods_answer_in_the_same_shape(server):
    assert "/v1/nothing" in check(await server.get("/v1/nothing"), 404)["message"]
    answer = await server.get("/v1/completions")
    assert "POST" in check(answer, 405)["message"]
    assert answer.headers["Allow"] == "POST"


async def test_a_body_beyond_the_limit_is_a_413(start_server):
    async with start_server(server={"max_body_mib": 1}) as server:
        body = io.BytesIO(json.dumps({"prompt": "x" * 2**21}).encode())
        error = check(await server.request("POST", "/v1/completions", data=body), 413)
        assert "1 MiB" in error["message"]
        assert (await server.complete(max_tokens=1)).status == 200


@pytest.mark.parametrize(
    "body",
    [gzip.compress(b'{"prompt": "x"}'), b"not gzip"],
    ids=["gzip", "not gzip"],  # the bytes hold the time: two workers would not agree on a name
)
async def test_a_compressed_body_is_a_415(server, body):
    headers = {"Content-Encoding": "gzip"}
    answer = await server.request("POST", "/v1/completions", data=body, headers=headers)
    assert "compressed" in check(answer, 415)["message"]
    assert (await server.complete(max_tokens=1)).status == 200


async def test_without_a_setting_the_largest_body_follows_from_the_model(start_server):
    for max_model_len, limit in ((4096, 1), (100_000, 4)):
        async with start_server(model={"max_model_len": max_model_len}) as server:
            body = io.BytesIO(b" " * (limit * 2**20 + 1))
            error = check(await server.request("POST", "/v1/completions", data=body), 413)
            assert f"{limit} MiB" in error["message"]


async def test_a_full_queue_is_a_429_with_retry_after(start_server):
    limits = {"max_num_seqs": 1, "max_waiting_requests": 2}
    async with start_server(scheduler=limits, runner={"step_base_ms": 20}) as server:
        answers = await asyncio.gather(
            *(server.complete([5, i], max_tokens=3, ignore_eos=True) for i in range(12))
        )
        refused = [answer for answer in answers if answer.status != 200]
        assert 0 < len(refused) < 12
        for answer in refused:
            assert check(answer, 429)["code"] == "engine_overloaded"
            assert int(answer.headers["Retry-After"]) >= 1
        assert (await server.complete(max_tokens=1)).status == 200


async def test_a_refused_prompt_of_many_leaves_nothing_behind(server):
    check(await server.complete([[5, 6]] * 50 + [[10**9]], max_tokens=500, ignore_eos=True))
    assert set((await server.gauges()).values()) == {0}
