"""Replies that keep to a schema, a pattern or a grammar, whatever the policy and the load."""

import asyncio
import contextlib
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from aioserve import AsyncEngine, EngineConfig, SamplingParams
from aioserve.config import CacheConfig, ModelConfig, RunnerConfig, SchedulerConfig
from aioserve.errors import GrammarLimitError, RequestError
from aioserve.features.grammars import compiler as grammars
from aioserve.features.grammars import rows
from aioserve.features.grammars.rows import GrammarRows
from aioserve.outputs import RequestOutput
from aioserve.params import StructuredOutputs
from aioserve.server.errors import to_wire
from tests.kit import case, stats_of
from tests.slow import mostly_slow

SCHEMAS: dict[str, Any] = json.loads(Path(__file__).with_name("schemas.json").read_text("utf-8"))
POLICIES = sorted(path.stem for path in Path("policies").glob("[a-z]*.py"))
VALIDATORS = {
    name: jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    for name, schema in SCHEMAS.items()
}

# The loop is the subject of other tests; these load a model each.
pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])


def config(dtype: str = "auto", **scheduler: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(max_model_len=1024, dtype=dtype),
        cache=CacheConfig(num_kv_blocks=66),  # less than 16 requests want together
        scheduler=SchedulerConfig(max_num_seqs=16, **scheduler),
        runner=RunnerConfig(threads=1),
    )


def params(seed: int = 0, *, way: StructuredOutputs, **fields: Any) -> SamplingParams:
    given = {"max_tokens": 900, "temperature": 1.0, "seed": seed, "structured_outputs": way}
    return SamplingParams(**given | fields)


def of_schema(name: str) -> StructuredOutputs:
    return StructuredOutputs(json=SCHEMAS[name])


async def reply(engine: AsyncEngine, params: SamplingParams) -> RequestOutput:
    whole = RequestOutput(request_id="")
    async for output in engine.generate("Answer:", params):
        whole.merge(output)
    return whole


async def replies(engine: AsyncEngine, wanted: Iterable[SamplingParams]) -> list[RequestOutput]:
    return await asyncio.gather(*(reply(engine, one) for one in wanted))


@pytest.mark.parametrize("policy", mostly_slow(POLICIES, but=["chunked_prefill"]))
async def test_replies_satisfy_their_schemas_under_every_policy(policy: str) -> None:
    depth = 1 + POLICIES.index(policy) % 2
    kinds = ("delta", "final_only")
    wanted = [(name, seed) for seed in range(3) for name in SCHEMAS]
    async with AsyncEngine(config(policy=policy, pipeline_depth=depth)) as engine:
        found = await replies(
            engine,
            [
                params(seed, way=of_schema(name), output_kind=kinds[seed % 2])
                for name, seed in wanted
            ],
        )
        assert stats_of(engine).num_preemptions > 0
    for (name, _), output in zip(wanted, found, strict=True):
        assert output.finish_reason == "stop", (name, output.text)
        VALIDATORS[name].validate(json.loads(output.text))


@pytest.mark.slow
@pytest.mark.parametrize("temperature", mostly_slow([0, 1.0], but=[1.0]))
async def test_what_is_forced_takes_fewer_steps_and_the_same_tokens(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [
        params(temperature=temperature, way=of_schema(name), logprobs=2)
        for name in ("tool call", "forty fields", "nested", "formats")
    ]
    wanted.append(params(way=of_schema("enum"), temperature=temperature, repetition_penalty=1.2))
    async with AsyncEngine(config("float32")) as engine:
        guessed = await replies(engine, wanted)
        num_steps = stats_of(engine).num_steps
    async with AsyncEngine(config("float32", pipeline_depth=2)) as engine:
        ahead = await replies(engine, wanted)
    monkeypatch.setattr(GrammarRows, "guesses", lambda self, row: [])
    async with AsyncEngine(config("float32")) as engine:
        one_by_one = await replies(engine, wanted)
        assert num_steps < stats_of(engine).num_steps
    for found, other, expected in zip(guessed, ahead, one_by_one, strict=True):
        assert found.token_ids == other.token_ids == expected.token_ids
        assert (found.logprobs is None) == (expected.logprobs is None)
        if found.logprobs is not None and expected.logprobs is not None:
            assert [p.top_token_ids for p in found.logprobs] == [
                p.top_token_ids for p in expected.logprobs
            ]
            assert len(found.logprobs) == len(found.token_ids)


async def test_forced_tokens_go_into_the_step_behind_the_one_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ways = [params(temperature=0, way=of_schema(name)) for name in ("tool call", "enum")]
    settings = config("float32", pipeline_depth=2)
    monkeypatch.setattr(rows, "STEP_SECONDS", 60.0)  # no row sits out on a slow machine
    async with AsyncEngine(settings) as engine:
        ahead = await replies(engine, ways)
        stats = stats_of(engine)
        # How many depends on when the second request joins the first: 35 to 60 were seen.
        assert stats.num_draft_tokens == stats.num_accepted_tokens > 20
    monkeypatch.setattr(GrammarRows, "guesses", lambda self, row: [])
    async with AsyncEngine(settings) as engine:
        expected = await replies(engine, ways)
        # By how many depends on when the second request joins the first.
        assert stats.num_steps < stats_of(engine).num_steps
    assert [one.token_ids for one in ahead] == [one.token_ids for one in expected]


async def test_texts_follow_patterns_choices_and_grammars() -> None:
    tag = {
        "structures": [{"begin": "<f>", "end": "</f>", "schema": SCHEMAS["enum"]}],
        "triggers": ["<f"],
    }
    ways = [
        StructuredOutputs(regex=r"[0-9]{3}-[a-z]{2,5}"),
        StructuredOutputs(choice=("red", "green", 'a "quote"')),
        StructuredOutputs(grammar='start: "a" INT\nINT: /[0-9]{1,4}/'),
        StructuredOutputs(grammar='root ::= "x" ("y" | "z")'),
        StructuredOutputs(json='{"type": "integer", "minimum": 5, "maximum": 7}'),
        StructuredOutputs(json=SCHEMAS["flat"], disable_any_whitespace=True),
        StructuredOutputs(json_object=True),
    ]
    async with AsyncEngine(config()) as engine:
        found = await replies(engine, [params(way=way, max_tokens=200) for way in ways])
        # Free text, but where it begins as a trigger does, it goes on as it must.
        begun = await reply(
            engine,
            params(
                way=StructuredOutputs(structural_tag=tag),
                max_tokens=60,
                logit_bias={i: 100.0 for i in engine.model_info.tokenizer.encode("<f")},
            ),
        )
    patterns = [
        r"[0-9]{3}-[a-z]{2,5}",
        r'red|green|a "quote"',
        r"a[0-9]{1,4}",
        r"x(y|z)",
        r"[567]",
        r'\{"name":"(\\.|[^"])*","age":\d+,"is_member":(true|false)\}',
    ]
    for pattern, output in zip(patterns, found, strict=False):
        assert output.finish_reason == "stop"
        assert re.fullmatch(pattern, output.text), (pattern, output.text)
    assert isinstance(json.loads(found[6].text), dict)
    if "<f" in begun.text:
        assert begun.text.split("<f", 1)[1].startswith(">{")


async def test_samples_stop_strings_and_free_requests_stand_side_by_side() -> None:
    way = StructuredOutputs(regex="(ab|cd){3}-(ab|cd){40}")
    async with AsyncEngine(config()) as engine:
        free = SamplingParams(max_tokens=12, temperature=0)
        alone = await reply(engine, free)
        texts = {0: "", 1: "", 2: ""}

        async def several() -> None:
            async for output in engine.generate("Answer:", params(way=way, n=3, stop="-")):
                texts[output.index] += output.text

        _, beside = await asyncio.gather(several(), reply(engine, free))
    assert beside.token_ids == alone.token_ids
    assert all(re.fullmatch("(ab|cd){3}", text) for text in texts.values())


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"regex": "("}, "structured_outputs.regex: .*invalid regex"),
    ({"json": {"type": "no type"}}, "structured_outputs.json: Invalid type"),
    ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "Unsatisfiable"),
    ({"json": {"not": {}}}, "Unimplemented keys"),
    ({"json": {"$ref": "http://127.0.0.1:1/x"}}, "does not fetch"),
    ({"json": "{"}, "no JSON object"),
    ({"grammar": "start: nobody"}, "unknown name"),
    ({"structural_tag": {"triggers": []}}, "missing required field `structures`"),
    ({"choice": ["x" * grammars.MAX_BYTES]}, "the limit is"),
]


async def test_what_cannot_be_is_refused_at_the_door() -> None:
    async with AsyncEngine(config()) as engine:
        for way, message in REFUSED:
            with case(way), pytest.raises(RequestError, match=message):
                await reply(engine, params(way=StructuredOutputs(**way)))


def chain(name: str, depth: int) -> str:
    """A grammar of rules of which each is the next one."""
    rules = [f"{name}{i}: {name}{i + 1}" for i in range(depth)]
    return "\n".join([f"start: {name}0", *rules, f'{name}{depth}: "a"'])


REFERENCES = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(5000)} | {"d5000": {}}


#: By what is deep.
DEEP: dict[str, dict[str, Any]] = {
    "rules": {"grammar": chain("r", 9000)},
    "terminals": {"grammar": chain("R", 9000)},
    "references": {"json": {"$defs": REFERENCES, "$ref": "#/$defs/d0"}},
    "regex": {"regex": "(" * 9000 + "a" + ")" * 9000},
    "brackets": {"grammar": "root ::= " + "(" * 9000 + '"a"' + ")" * 9000},
    "schema": {"json": '{"properties": {"a":' * 900 + "{}" + "}}" * 900},
    "states": {"regex": "((a|b)*a(a|b){200}){1,50}c"},
    "itself": {"json": {"$ref": "#"}},
}


async def test_no_depth_of_a_grammar_ends_the_process() -> None:
    async with AsyncEngine(config()) as engine:
        for what, way in DEEP.items():
            sys.stderr.write(f"{what}\n")  # `pytest -s` shows which one ends the process
            with case(what):
                with contextlib.suppress(RequestError):  # some can be, and some are refused
                    found = await reply(engine, params(way=StructuredOutputs(**way), max_tokens=5))
                    assert found.finish_reason in ("stop", "length")
                assert (await reply(engine, SamplingParams(max_tokens=2))).finish_reason


async def test_a_grammar_that_grows_too_complex_fails_its_own_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(grammars.LIMITS, "max_lexer_states", 300)
    way = StructuredOutputs(regex="[a-z]{900}")  # a state for each, and its trial has 8 tokens
    async with AsyncEngine(config()) as engine:
        others = asyncio.create_task(reply(engine, SamplingParams(max_tokens=60)))
        with pytest.raises(GrammarLimitError, match=r"structured_outputs.*[Ss]tate") as caught:
            await reply(engine, params(way=way, max_tokens=400))
        assert to_wire(caught.value)[0] == 400
        assert (await others).finish_reason == "length"


async def test_an_engine_that_masks_nothing_says_so() -> None:
    for settings, reason in [
        (EngineConfig(runner=RunnerConfig(runner="simulated")), "no logits to mask"),
        (EngineConfig(model=ModelConfig(skip_tokenizer_init=True)), "no tokenizer"),
    ]:
        async with AsyncEngine(settings) as engine:
            wanted = params(way=StructuredOutputs(regex="a"), detokenize=False)
            with pytest.raises(RequestError, match=reason):
                await engine.add_request([5, 6], wanted)


async def test_what_contradicts_itself_is_no_structured_output() -> None:
    for fields in ({}, {"regex": "a", "json_object": True}, {"json_object": False}):
        with pytest.raises(RequestError, match="takes one of json, json_object"):
            StructuredOutputs(**fields)
    with pytest.raises(RequestError, match="at least one text"):
        StructuredOutputs(choice=())
    for name, value in (("min_tokens", 3), ("ignore_eos", True)):
        with pytest.raises(RequestError, match=f"{name} cannot be combined"):
            params(way=StructuredOutputs(regex="a"), **{name: value})
