"""Ollama's own client: whole and streamed replies, tools, formats, models, errors."""

import json

import pytest

ollama = pytest.importorskip("ollama", reason="make test-clients installs it")

ASK = [{"role": "user", "content": "Say a word."}]
OPTIONS = {"num_predict": 16, "temperature": 0, "num_ctx": 512}


def weather(city: str) -> str:
    """Tell the weather.

    Args:
        city: the name of a city
    """
    return f"{city}: rain"


@pytest.fixture
def client(model_url):
    return ollama.Client(host=model_url)


def test_a_stream_says_what_the_whole_says(client):
    whole = client.chat("smollm2", ASK, options=OPTIONS)
    pieces = list(client.chat("smollm2", ASK, options=OPTIONS, stream=True))
    assert "".join(piece.message.content for piece in pieces) == whole.message.content
    assert whole.message.content
    last = pieces[-1]
    assert last.done
    assert last.done_reason in ("stop", "length")
    assert last.eval_count == whole.eval_count > 0
    assert last.total_duration >= last.prompt_eval_duration > 0


async def test_the_client_for_asyncio_streams(model_url):
    client = ollama.AsyncClient(host=model_url)
    stream = await client.chat("smollm2:latest", ASK, options=OPTIONS, stream=True)
    assert "".join([piece.message.content async for piece in stream])


def test_a_reply_keeps_to_a_schema(client):
    schema = {
        "type": "object",
        "properties": {"word": {"enum": ["yes", "no"]}},
        "required": ["word"],
        "additionalProperties": False,
    }
    reply = client.chat("smollm2", ASK, format=schema, options=OPTIONS)
    assert json.loads(reply.message.content)["word"] in ("yes", "no")


def test_a_tool_is_called_and_its_result_goes_back(scripted):
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    url, say = scripted
    client, messages = ollama.Client(host=url), list(ASK)
    say(call)
    reply = client.chat("embedded", messages, tools=[weather])
    [made] = reply.message.tool_calls
    assert (made.function.name, made.function.arguments) == ("weather", {"city": "Paris"})
    result = weather(**made.function.arguments)
    messages += [reply.message, {"role": "tool", "tool_name": "weather", "content": result}]
    say("It rains.")
    assert client.chat("embedded", messages, tools=[weather]).message.content == "It rains."


def test_a_prompt_is_answered(client):
    assert client.generate("smollm2", "Say a word.", options=OPTIONS).response
    streamed = client.generate("smollm2", "Say a word.", options=OPTIONS, stream=True)
    assert "".join(piece.response for piece in streamed)
    assert client.generate("smollm2", "The sea", raw=True, options=OPTIONS).response


def test_models_are_listed_and_shown(client):
    [model] = client.list().models
    assert model.model == "smollm2"
    assert model.size > 10**7
    assert client.ps().models[0].model == "smollm2"
    shown = client.show("smollm2")
    assert "completion" in shown.capabilities
    assert shown.modelinfo["llama.context_length"] == 1024


def test_errors_are_the_clients_own(client):
    with pytest.raises(ollama.ResponseError, match="'other'") as refusal:
        client.chat("other", ASK)
    assert refusal.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match=r"options\.temperature"):
        client.chat("smollm2", ASK, options={"temperature": 9})
