"""Replies in harmony that are bound: forced calls, strict ones, and schemas of the answer."""

from functools import cache

import pytest

from aioserve.config import ModelConfig
from aioserve.features.formats.harmony import HarmonyParser
from aioserve.features.grammars import GrammarCompiler
from aioserve.model_source.info import ModelInfo
from tests.server.chat.harmony_model import harmony_model
from tests.server.chat.test_forced_calls import ARGUMENTS, HAIR, STRICT, WRONG, takes  # noqa: F401


@pytest.fixture(scope="module")
def compilers(tmp_path_factory):
    """By chat template and special tokens: a model whose end of text is no mark of harmony."""

    @cache
    def made(template, special):
        path = harmony_model(tmp_path_factory.mktemp("m"), template, special)
        info = ModelInfo(ModelConfig(model=path))
        return info, GrammarCompiler(info)

    return made


THOUGHT = "<|channel|>analysis<|message|>Hm: to=functions.paint.<|end|><|start|>assistant"
ROLE = f" to=functions.paint<|channel|>commentary json<|message|>{ARGUMENTS}"
CALLS = [
    ROLE,
    ROLE.replace(" json", " <|constrain|>json"),
    f"<|channel|>commentary to=functions.paint<|constrain|>json<|message|>{ARGUMENTS}",
    f"<|channel|>commentary to=functions.paint<|message|>{ARGUMENTS}",
]
MARKS = [(), HarmonyParser.markers, ("<|channel|>",)]


@pytest.mark.parametrize("special", MARKS)
async def test_a_forced_call_is_bound_in_each_form_behind_thoughts(takes, special):  # noqa: F811
    with_it = {"special": special}
    for call in CALLS:
        assert await takes(call, "harmony", "auto", **with_it)
        assert await takes(
            f"{THOUGHT}{THOUGHT}{call}<|call|>",
            "harmony",
            "auto",
            **with_it,
        )
        assert not await takes(call.replace(ARGUMENTS, WRONG), "harmony", "auto", **with_it)
        assert not await takes(call.replace("paint", "sell"), "harmony", "auto", **with_it)
    assert not await takes(f"Hm.{ROLE}", "harmony", "auto", **with_it)


@pytest.mark.parametrize("special", MARKS)
async def test_a_call_that_the_model_begins_keeps_to_its_strict_schema(takes, special):  # noqa: F811
    strict = {"use": STRICT, "special": special}
    preamble = "<|channel|>commentary<|message|>I paint.<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>Ay: to=functions.paint.<|end|>"
    assert await takes(THOUGHT + final, "harmony", "auto", **strict)
    assert await takes(final.removesuffix("<|end|>"), "harmony", "auto", **strict)
    assert await takes("Ay.", "harmony", "auto", **strict)
    for call in CALLS:
        for before in ("", THOUGHT, THOUGHT + preamble):
            assert await takes(before + call, "harmony", "auto", **strict)
            assert await takes(f"{before}{call}<|call|>", "harmony", "auto", **strict)
            wrong = before + call.replace(ARGUMENTS, WRONG)
            assert not await takes(wrong, "harmony", "auto", **strict)


@pytest.mark.parametrize("special", MARKS)
async def test_a_schema_binds_the_final_channel(takes, special):  # noqa: F811
    bound = {"use": None, "json": HAIR, "special": special}
    answer = '<|channel|>final<|message|>{"hair": "red"}'
    assert await takes(THOUGHT + answer, "harmony", "auto", **bound)
    assert await takes(answer, "harmony", "auto", **bound)
    assert not await takes(THOUGHT + answer.replace("red", "blue"), "harmony", "auto", **bound)
    assert not await takes('{"hair": "red"}', "harmony", "auto", **bound)
