"""`suffix` fills in the middle with models that have the tokens; others refuse it in words."""

import pytest

from aioserve.errors import RequestError
from aioserve.server.completions import INFILLING, infilling
from tests.server.serving import SIMULATED, running


class Vocabulary:
    """A tokenizer of which the added tokens are asked."""

    def __init__(self, *added: str) -> None:
        self._added = {token: number for number, token in enumerate(added)}

    def get_added_vocab(self) -> dict[str, int]:
        return self._added


@pytest.mark.parametrize("marks", INFILLING)
def test_a_prompt_has_what_stands_before_and_what_follows(marks):
    before, after, begin = marks
    made = infilling(Vocabulary("<pad>", *marks), "def f(", "return a")
    assert made == f"{before}def f({after}return a{begin}"


def test_deepseeks_marks_are_written_as_its_vocabulary_has_them():
    assert INFILLING[2][1].encode() == b"<\xef\xbd\x9cfim\xe2\x96\x81hole\xef\xbd\x9c>"


def test_a_model_without_the_tokens_and_token_ids_are_refused():
    with pytest.raises(RequestError, match="needs a model with tokens for infilling") as refusal:
        infilling(Vocabulary("<pad>", "<fim_prefix>"), "x", "y")
    assert refusal.value.param == "suffix"
    with pytest.raises(RequestError, match="a prompt that is a text, got token ids"):
        infilling(Vocabulary(*INFILLING[0]), [1, 2], "y")


@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_the_routes_ask_for_the_tokens_of_the_model():
    async with running(SIMULATED) as server:
        for path, body in (
            ("/v1/completions", {"prompt": "def f(", "suffix": "return a", "max_tokens": 4}),
            ("/api/generate", {"model": "embedded", "prompt": "def f(", "suffix": "return a"}),
        ):
            answer = await server.request("POST", path, json=body)
            assert answer.status == 400
            assert "tokens for infilling" in answer.body.decode()
        tokenizer = server.engine.model_info.tokenizer
        tokenizer.add_special_tokens({"additional_special_tokens": list(INFILLING[0])})
        body = {"prompt": "def f(", "suffix": "return a", "max_tokens": 4, "echo": True}
        answer = await server.request("POST", "/v1/completions", json=body)
        assert "echo cannot be with suffix" in answer.json()["error"]["message"]
        body["echo"] = False
        for fields, words in (
            ({"prompt": ["a", "b"]}, "suffix takes one prompt, got 2"),  # each would hold a copy
            ({"truncate_prompt_tokens": 4}, "truncate_prompt_tokens cannot be with suffix"),
        ):
            refused = await server.request("POST", "/v1/completions", json={**body, **fields})
            assert refused.status == 400
            assert words in refused.json()["error"]["message"]
        answer = await server.request("POST", "/v1/completions", json=body)
        assert answer.status == 200
        plain = {**body, "suffix": "", "prompt": "def f("}
        other = await server.request("POST", "/v1/completions", json=plain)
        filled, alone = (a.json()["usage"]["prompt_tokens"] for a in (answer, other))
        assert filled > alone
