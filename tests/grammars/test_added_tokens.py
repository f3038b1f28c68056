"""Grammars over the added tokens of real families: what is forced is taken, and read as said."""

import json
import random
import re
from collections.abc import Iterator

import numpy as np
import pytest

from aioserve.config import ModelConfig
from aioserve.engine.detokenizer import DetokenizerChoice
from aioserve.features.grammars import GrammarCompiler
from aioserve.features.grammars.tokenizer import SeenTokenizer
from aioserve.model_source.info import ModelInfo
from aioserve.params import StructuredOutputs
from tests.added_tokens import FAMILIES, family_model
from tests.slow import mostly_slow

# The loop is the subject of other tests.
pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])


class Bound:
    """What a model of a family may say."""

    def __init__(self, path: str) -> None:
        self.info = ModelInfo(ModelConfig(model=path))
        self.compiler = GrammarCompiler(self.info)
        self.ids = self.info.tokenizer.get_vocab()
        self._shown = DetokenizerChoice(self.info.tokenizer).choose(skip_special_tokens=True)

    def text(self, token_ids: list[int]) -> str:
        """What a client reads of these tokens."""
        shown = self._shown([])
        return shown.append(token_ids) + shown.flush()

    async def forced(self, **wanted: object) -> list[int]:
        """The tokens of a text that leaves no choice but of the tokens that spell it: those that
        are sent ahead, else the first that the mask allows.
        """
        bound = StructuredOutputs(**wanted)  # type: ignore[arg-type]
        await self.compiler.check(bound)
        matcher, said = self.compiler.matcher(bound), list[int]()
        while not matcher.is_stopped():
            bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()
            ahead = matcher.compute_ff_tokens()
            assert matcher.validate_tokens(ahead) == len(ahead)
            assert not ahead or allowed == ahead[:1]
            said += ahead or allowed[:1]
            assert matcher.consume_tokens(ahead or allowed[:1]), matcher.get_error()
        return said


@pytest.fixture(
    scope="module", params=mostly_slow(FAMILIES, but=["gemma", "gpt_oss", "mistral", "qwen"])
)
def bound(request, tmp_path_factory) -> Iterator[Bound]:
    family = FAMILIES[request.param]
    found = Bound(family_model(family, tmp_path_factory.mktemp("family")))
    yield found
    found.compiler.close()


def every_way(text: str) -> list[dict[str, object]]:
    """The grammars of clients that leave this text alone."""
    tag = {"type": "tag", "begin": text, "content": {"type": "const_string", "value": "x"}}
    return [
        {"regex": re.escape(text)},
        {"choice": (text,)},
        {"json": {"const": text}},
        {"grammar": f"start: {json.dumps(text, ensure_ascii=False)}"},
        {"grammar": f"root ::= {json.dumps(text, ensure_ascii=False)}"},
        {"structural_tag": {"type": "structural_tag", "format": {**tag, "end": text}}},
    ]


async def test_a_forced_text_with_added_tokens_in_it_is_written_and_read(bound: Bound) -> None:
    tokenizer = bound.info.tokenizer
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    in_all_ways = {
        next(i for i in added if added[i].special == is_special)
        for is_special in {token.special for token in added.values()}
    }
    for place, (token_id, token) in enumerate(added.items()):
        text = f"a{token.content}b {token.content}"
        ways = every_way(text)
        for way in ways if token_id in in_all_ways else [ways[place % len(ways)]]:
            said = await bound.forced(**way)
            is_json, is_tag = "json" in way, "structural_tag" in way
            expected = json.dumps(text) if is_json else f"{text}x{text}" if is_tag else text
            told = bound.text(said)
            assert told == expected or json.loads(told) == text, way
            # A control is none of the text; else it is the token that the model has learned.
            assert (token_id in said) == (not token.special) or is_json or token.rstrip, said


async def test_what_begins_with_an_added_token_begins_with_it(bound: Bound) -> None:
    added = bound.info.tokenizer.backend_tokenizer.get_added_tokens_decoder()
    for token_id, token in added.items():
        said = await bound.forced(regex=re.escape(token.content) + "[.]?")
        assert (said[0] == token_id) == (not token.special)
        assert bound.text(said).rstrip(".") == token.content


async def test_a_rule_may_name_a_token_without_quotes(bound: Bound) -> None:
    added = bound.info.tokenizer.backend_tokenizer.get_added_tokens_decoder()
    names = {added[token_id].content for token_id in added.keys() - bound.info.eos_token_ids}
    for name in (name for name in names if re.fullmatch("<.+>", name)):
        pattern = re.escape(name).replace("/", r"\/")
        rules = f'start: {name} "{name}" inner // {name}\ninner: /{pattern}/'
        said = await bound.forced(grammar=rules)
        assert said[0] == bound.ids[name]
        assert bound.text(said[1:]) == name * 2


async def test_a_text_that_the_tokenizer_would_change_is_written_as_it_is(bound: Bound) -> None:
    for text in ("e\u0301", " a", "  a\n\n\nb", "\u212b", "a\u00a0\u2581b", "\x00\U0001f642"):
        assert bound.text(await bound.forced(choice=(text,))) == text


async def test_a_forced_text_of_any_length_is_written_and_spelled_a_part_at_a_time(
    bound: Bound,
) -> None:
    rng = random.Random(0)
    added = bound.info.tokenizer.backend_tokenizer.get_added_tokens_decoder()
    pieces = [token.content for token in added.values()] + ["a", " the", "\n", "\u0301", "\u65e5"]
    text = "".join(rng.choices(pieces, k=1200))
    assert bound.text(await bound.forced(choice=(text,))) == text
    seen = SeenTokenizer(bound.info.tokenizer, bound.info.vocab_size, bound.info.eos_token_ids)
    assert 0 < len(seen(text * 100)) == len(seen(text * 200)) < 20_000


async def test_free_text_takes_the_tokens_of_text_and_no_controls(bound: Bound) -> None:
    free = StructuredOutputs(regex="(.|\n)*!")
    await bound.compiler.check(free)
    added = bound.info.tokenizer.backend_tokenizer.get_added_tokens_decoder()
    for token_id, token in added.items():
        matcher = bound.compiler.matcher(free)
        assert matcher.validate_tokens([token_id]) == (not token.special), token
