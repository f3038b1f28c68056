"""Tokens of a prompt or of messages are those that a request of them has."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer

import aioserve
from aioserve.features.grammars.tokenizer import SeenTokenizer

EMBEDDED = Path(aioserve.__file__).parent / "model_source" / "embedded"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who's there?"}]


@pytest.mark.parametrize("text", ["Who's there?", "", "é " * 3000, "a\u2603b"])
async def test_a_text_comes_back_as_it_was(server, text):
    tokens = (await server.request("POST", "/tokenize", json={"prompt": text})).json()
    assert tokens["count"] == len(tokens["tokens"])
    assert tokens["max_model_len"] == server.engine.max_model_len
    assert tokens["token_strs"] is None
    back = await server.request("POST", "/detokenize", json={"tokens": tokens["tokens"]})
    assert back.json() == {"prompt": text}


async def test_messages_have_the_tokens_of_a_chat(server):
    body = {"model": "embedded", "messages": MESSAGES, "return_token_strs": True}
    tokens = (await server.request("POST", "/tokenize", json=body)).json()
    usage = (await server.chat(messages=MESSAGES, max_tokens=1)).json()["usage"]
    assert tokens["count"] == usage["prompt_tokens"]
    spell = server.engine.model_info.tokenizer.convert_ids_to_tokens
    assert tokens["token_strs"] == spell(tokens["tokens"])


async def test_messages_are_rendered_as_a_chat_renders_them(server):
    messages = [*MESSAGES, {"role": "assistant", "content": "Nay, answer me"}]
    counts = set()
    for fields in (
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"add_generation_prompt": True},
    ):
        body = {"messages": messages, **fields}
        counts.add((await server.request("POST", "/tokenize", json=body)).json()["count"])
        chat = await server.chat(**body, max_tokens=1)
        assert chat.json()["usage"]["prompt_tokens"] in counts
    assert len(counts) > 1


async def test_more_tokens_than_the_model_takes_are_counted(start_server):
    async with start_server(model={"max_model_len": 16}) as server:
        body = {"prompt": "word " * 30}
        tokens = (await server.request("POST", "/tokenize", json=body)).json()
        assert tokens["count"] >= 30 > tokens["max_model_len"] == 16


async def test_special_tokens_are_left_out_of_a_prompt_when_asked(start_server, tmp_path):
    model = shutil.copytree(EMBEDDED, tmp_path / "model")
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    special = tokenizer["added_tokens"][0]["content"]
    number = tokenizer["added_tokens"][0]["id"]
    before = [{"SpecialToken": {"id": special, "type_id": 0}}]
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [*before, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"],
        "special_tokens": {special: {"id": special, "ids": [number], "tokens": [special]}},
    }
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    async with start_server(model={"model": str(model)}) as server:
        tokens = [
            (await server.request("POST", "/tokenize", json={"prompt": "x", **fields})).json()
            for fields in ({}, {"add_special_tokens": True}, {"add_special_tokens": False})
        ]
    [plain] = tokens[2]["tokens"]
    assert plain != number
    assert tokens[0]["tokens"] == tokens[1]["tokens"] == [number, plain]


NOT_TOKENIZED = [
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
    ("/tokenize", {"prompt": "x", "tools": [{}]}, "tools"),
    ("/tokenize", {"prompt": "x", "continue_final_message": True}, "continue_final_message"),
    ("/tokenize", {"prompt": "x", "chat_template": "y"}, "chat_template"),
    ("/tokenize", {"prompt": "word " * 100_000}, "prompt"),
    ("/tokenize", {"messages": [{"role": "user", "content": "x" * 200_000}]}, "messages"),
    ("/tokenize", {"prompt": "x", "model": "gpt"}, "model"),
    ("/detokenize", {"tokens": [10**9]}, "tokens"),
    ("/detokenize", {"tokens": [5, "a"]}, "tokens[1]"),
    ("/detokenize", {"tokens": [5], "token": 1}, "token"),
]


async def test_what_cannot_be_tokenized_is_refused_by_name(server):
    for path, body, param in NOT_TOKENIZED:
        answer = await server.request("POST", path, json=body)
        assert answer.status == (404 if param == "model" else 400), body
        assert answer.json()["error"]["param"] == param


async def test_a_text_at_which_the_tokenizer_panics_is_refused_in_words(start_server, tmp_path):
    model = shutil.copytree(EMBEDDED, tmp_path / "model")
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    steps = [{**split, "pattern": {"Regex": "(x+x+)+y"}}, tokenizer["pre_tokenizer"]]
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    text = "x" * 200
    asked = {
        "/tokenize": ({"prompt": text}, "prompt"),
        "/v1/completions": ({"prompt": text, "max_tokens": 1}, "prompt"),
        "/v1/embeddings": ({"input": text}, "input"),
        "/v1/chat/completions": ({"messages": [{"role": "user", "content": text}]}, "messages"),
    }
    async with start_server(model={"model": str(model)}) as server:
        for path, (body, param) in asked.items():
            answer = await server.request("POST", path, json=body)
            assert (answer.status, answer.json()["error"]["param"]) == (400, param)
            assert "retry-limit-in-match" in answer.json()["error"]["message"]
    backend = Tokenizer.from_file(str(model / "tokenizer.json"))
    seen = SeenTokenizer(SimpleNamespace(backend_tokenizer=backend), 2048, [1])
    assert b"".join(seen.tokens[token_id] for token_id in seen(text)).decode() == text
