"""POST /v1/completions over a real socket."""

import asyncio
from itertools import product

from aioserve.scheduler import BaseScheduler


async def test_a_completion_has_the_shape_of_openai(server):
    answer = await server.complete(model="embedded", max_tokens=5, ignore_eos=True)
    body = answer.json()
    assert answer.status == 200
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["model"] == "embedded"
    assert body["created"] > 1_700_000_000
    [choice] = body["choices"]
    assert choice["text"]
    assert {**choice, "text": ""} == {
        "index": 0,
        "text": "",
        "logprobs": None,
        "finish_reason": "length",
    }
    usage = body["usage"]
    assert usage["completion_tokens"] == 5
    assert usage["total_tokens"] == usage["prompt_tokens"] + 5
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_a_stream_tells_the_same_text_as_a_whole_response(server):
    options = {"max_tokens": 40, "seed": 7}
    whole = (await server.complete(**options)).json()["choices"][0]
    answer = await server.complete(stream=True, **options)
    assert answer.headers["Content-Type"] == "text/event-stream"
    choices = [event["choices"][0] for event in answer.events()]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    reasons = [choice["finish_reason"] for choice in choices]
    assert reasons == [None] * (len(reasons) - 1) + [whole["finish_reason"]]


async def test_sixteen_tokens_are_the_default_and_null_is_the_models_limit(start_server):
    async with start_server(model={"max_model_len": 64}) as server:
        default = await server.complete([5] * 10, ignore_eos=True)
        unlimited = await server.complete([5] * 10, ignore_eos=True, max_tokens=None)
    assert default.json()["usage"]["completion_tokens"] == 16
    assert unlimited.json()["usage"]["total_tokens"] == 64


async def test_usage_ends_a_stream_only_if_asked_for(server):
    for options in (None, {}, {"include_usage": False}):
        answer = await server.complete(max_tokens=3, stream=True, stream_options=options)
        assert all("usage" not in event for event in answer.events())
        assert answer.events()[-1]["choices"][0]["finish_reason"] == "length"
    options = {"include_usage": True}
    answer = await server.complete(max_tokens=3, stream=True, stream_options=options)
    *deltas, last = answer.events()
    assert all(delta["usage"] is None for delta in deltas)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3


async def test_every_chunk_can_tell_the_usage_of_its_sample(server):
    options = {"continuous_usage_stats": True}
    answer = await server.complete(
        max_tokens=4, stream=True, ignore_eos=True, stream_options=options
    )
    counts = [event["usage"]["completion_tokens"] for event in answer.events()]
    assert counts == sorted(counts)
    assert counts[-1] == 4


async def test_choices_of_many_prompts_are_numbered_prompt_by_prompt(server):
    fields = {"max_tokens": 6, "ignore_eos": True}
    kinds = (["One", "Two", "Three"], [[5, 6], [7], [8, 9, 10]])
    for prompts, stream in product(kinds, (False, True)):
        alone = [(await server.complete(p, **fields)).json()["choices"][0]["text"] for p in prompts]
        answer = await server.complete(prompts, n=2, stream=stream, **fields)
        # Simulated tokens depend on the prompt alone, so the samples of one prompt are equal.
        assert texts_of(answer, stream, 6) == [text for text in alone for _ in range(2)]


def texts_of(answer, stream, number):
    """The texts of a number of choices."""
    texts = [""] * number
    for chunk in answer.events() if stream else [answer.json()]:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    return texts


async def test_usage_counts_each_prompt_once_and_every_sample(server):
    answer = await server.complete([[5] * 3, [6] * 4], n=3, max_tokens=5, ignore_eos=True)
    usage = answer.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (7, 30)


async def test_cached_tokens_are_told(server):
    prompt = list(range(10, 110))
    await server.complete(prompt, max_tokens=2)
    usage = (await server.complete(prompt, max_tokens=2)).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 96  # whole blocks of 16


async def test_stop_strings_and_stop_tokens_are_honoured(server):
    whole = (await server.complete(max_tokens=12, return_token_ids=True)).json()["choices"][0]
    stop = whole["text"][4:7]
    choice = (await server.complete(max_tokens=12, stop=stop)).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == stop
    assert choice["text"] == whole["text"].partition(stop)[0]
    token_id = whole["token_ids"][2]
    fields = {"stop_token_ids": [token_id], "return_token_ids": True}
    choice = (await server.complete(max_tokens=12, **fields)).json()["choices"][0]
    assert choice["stop_reason"] == token_id
    assert len(choice["token_ids"]) == whole["token_ids"].index(token_id) + 1


async def test_logprobs_cover_every_token_with_running_offsets(server):
    fields = {"max_tokens": 6, "logprobs": 2, "ignore_eos": True}
    whole = (await server.complete(**fields)).json()["choices"][0]
    logprobs = whole["logprobs"]
    assert "".join(logprobs["tokens"]) == whole["text"]
    assert len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == 6
    offsets = [whole["text"].index(logprobs["tokens"][0])]
    for token in logprobs["tokens"][:-1]:
        offsets.append(offsets[-1] + len(token))
    assert logprobs["text_offset"] == offsets
    chunks = (await server.complete(stream=True, **fields)).events()
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    for name, values in logprobs.items():
        assert [value for part in streamed for value in part[name]] == values


async def test_only_the_end_of_a_long_prompt_is_kept_if_asked_for(start_server):
    async with start_server(model={"max_model_len": 64}) as server:
        tokenizer = server.engine.model_info.tokenizer
        text = "What news, my lord? " * 100
        token_ids = tokenizer.encode(text)
        fields = {"max_tokens": 9, "ignore_eos": True}
        for prompt in (text, token_ids):
            assert (await server.complete(prompt, **fields)).status == 400
            for keep, num_kept in ((20, 20), (-1, 55), (63, 63)):
                kept = await server.complete(token_ids[-num_kept:], **fields)
                answer = await server.complete(prompt, truncate_prompt_tokens=keep, **fields)
                assert answer.json()["choices"] == kept.json()["choices"]
                assert answer.json()["usage"]["prompt_tokens"] == num_kept
            answer = await server.complete(prompt, truncate_prompt_tokens=64, **fields)
            assert (answer.status, answer.json()["error"]["param"]) == (400, "prompt")
        answer = await server.chat(text, truncate_prompt_tokens=-1, max_tokens=63)
        assert answer.json()["usage"]["prompt_tokens"] == 1


async def test_an_echo_is_the_prompt_before_each_choice(server):
    echoes = ["Speak!", "Speak!", "Who?", "Who?"]
    for stream in (False, True):
        fields = {"max_tokens": 4, "ignore_eos": True, "n": 2, "stream": stream}
        plain, echoed = [
            texts_of(await server.complete(["Speak!", "Who?"], echo=echo, **fields), stream, 4)
            for echo in (False, True)
        ]
        assert echoed == [echo + text for echo, text in zip(echoes, plain, strict=True)]
    ids = server.engine.model_info.tokenizer.encode("Whither?", add_special_tokens=False)
    choice = (await server.complete(ids, echo=True, max_tokens=1)).json()["choices"][0]
    assert choice["text"].startswith("Whither?")


async def test_of_best_of_samples_n_are_told_and_all_are_counted(server):
    answer = await server.complete(n=2, best_of=5, max_tokens=3, ignore_eos=True)
    assert [(c["index"], c["logprobs"]) for c in answer.json()["choices"]] == [(0, None), (1, None)]
    assert answer.json()["usage"]["completion_tokens"] == 15


async def test_token_ids_come_only_if_asked_for(server):
    plain = (await server.complete(max_tokens=4)).json()["choices"][0]
    asked = (await server.complete(max_tokens=4, return_token_ids=True)).json()["choices"][0]
    assert "token_ids" not in plain
    assert len(asked["token_ids"]) == 4


async def test_a_request_id_of_the_caller_comes_back(server):
    headers = {"X-Request-Id": "trace-17"}
    answer = await server.request(
        "POST", "/v1/completions", json={"prompt": "Hi", "stream": True}, headers=headers
    )
    assert answer.headers["X-Request-Id"] == "trace-17"
    answer = await server.complete()
    assert answer.headers["X-Request-Id"] == answer.json()["id"]


async def test_what_is_said_of_a_request_reaches_the_scheduler(server, monkeypatch):
    seen = []
    add_request = BaseScheduler.add_request

    def spy(scheduler, request):
        seen.append((request.priority, request.user, request.cache_salt))
        return add_request(scheduler, request)

    monkeypatch.setattr(BaseScheduler, "add_request", spy)
    await server.complete(priority=-3, user="will", cache_salt="mine", max_tokens=1)
    await server.chat(max_tokens=1)
    assert seen == [(-3, "will", "mine"), (0, "", "")]


async def test_a_request_can_choose_its_id(server):
    for ask in (server.chat, server.complete):
        answer = await ask(request_id="mine-7", max_tokens=2)
        assert answer.json()["id"] == answer.headers["X-Request-Id"] == "mine-7"
        events = (await ask(request_id="mine-7", max_tokens=2, stream=True)).events()
        assert {event["id"] for event in events} == {"mine-7"}


async def test_an_id_in_use_is_a_409(server):
    async def ask():
        return await server.complete(request_id="mine", max_tokens=200, ignore_eos=True)

    answers = await asyncio.gather(*(ask() for _ in range(5)))
    assert sorted(answer.status for answer in answers) == [200, 409, 409, 409, 409]
    refused = next(answer for answer in answers if answer.status == 409)
    error = refused.json()["error"]
    assert (error["param"], error["code"]) == ("request_id", "request_id_in_use")
    assert (await ask()).status == 200
    prompts = await server.complete(["a", "b"], request_id="mine", max_tokens=2, n=2)
    assert len(prompts.json()["choices"]) == 4


async def test_an_id_that_no_log_could_show_is_refused(server):
    for bad in ("", "x" * 129, "two\nlines", "ü", 7):
        answer = await server.complete(request_id=bad)
        assert (answer.status, answer.json()["error"]["param"]) == (400, "request_id"), bad


async def test_token_ids_can_be_had_without_text(server):
    fields = {"max_tokens": 6, "ignore_eos": True, "detokenize": False}
    answer = await server.complete(**fields)
    assert (answer.status, answer.json()["error"]["param"]) == (400, "detokenize")
    fields["return_token_ids"] = True
    for ask in (server.complete, server.chat):
        (choice,) = (await ask(**fields)).json()["choices"]
        assert len(choice["token_ids"]) == 6
        assert (choice["text"] if ask == server.complete else choice["message"]["content"]) == ""
    events = (await server.complete(**fields, stream=True)).events()
    ids = [i for event in events for i in event["choices"][0]["token_ids"]]
    assert ids == (await server.complete(**fields)).json()["choices"][0]["token_ids"]
