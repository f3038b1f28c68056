"""A policy is changed in one place, and stays a policy whose other lines are as they were."""

import ast
import random
from pathlib import Path

import pytest

from aioserve.errors import ConfigError
from aioserve.lab.evaluate.enclosure import look
from aioserve.lab.evaluate.evaluator import read_policy
from aioserve.lab.evolve import ORDER_KEYS, changes, code_in, mutate

CHUNKED = read_policy("chunked_prefill")


def test_an_option_or_the_order_is_changed_and_nothing_else() -> None:
    made = [mutate(CHUNKED, random.Random(seed)) for seed in range(60)]
    for source, how in made:
        look(source, "mine.py")
        lines = [line for line in changes(CHUNKED, source).splitlines() if line[0] in "+-"]
        if how.startswith("chunk_size: 512 to "):
            assert [line[0] for line in lines] == ["-", "+"]
            assert "# tokens per step, decodes included" in lines[1], "the comment stays"
        else:
            assert how.startswith("order: ")
            assert all(line[0] == "+" for line in lines), "the import and the method are new"
    kinds = {how.partition(":")[0] for _, how in made}
    assert kinds == {"chunk_size", "order"}


def test_an_order_is_replaced_by_another_one() -> None:
    source = CHUNKED
    for seed in range(40):
        source = mutate(source, random.Random(seed)).source
    assert source.count("def order(") == 1
    assert len(ORDER_KEYS) > 1
    look(source, "mine.py")


def test_numbers_that_are_no_options_are_changed_where_they_stand() -> None:
    source = (
        "LIMIT = 40  # é\nclass P:\n    def schedule(self):\n        return 'ü', 2.5 if 1 else 0\n"
    )
    made = {mutate(source, random.Random(seed)) for seed in range(80)}
    numbers = [child for child in made if child.how.startswith("line ")]
    assert {how.partition(":")[0] for _, how in numbers} == {"line 1", "line 4"}
    for changed, how in numbers:
        ast.parse(changed)
        assert how.rpartition(" ")[2] in changed
        assert "1 else 0" in changed, "0 and 1 are seldom quantities"


def test_the_same_seed_makes_the_same_change() -> None:
    assert mutate(CHUNKED, random.Random(3)) == mutate(CHUNKED, random.Random(3))


def test_what_cannot_be_changed_is_refused() -> None:
    with pytest.raises(ConfigError, match="no option, no number and no class"):
        mutate("x = None", random.Random(0))
    with pytest.raises(ConfigError, match="line 1 of the policy"):
        mutate("What news, my lord?", random.Random(0))


def test_code_is_the_longest_block_of_an_answer() -> None:
    text = "Here:\n```python\nx = 1\ny = 2\n```\nor\n```\nz\n```\n"
    assert code_in(text) == "x = 1\ny = 2\n"
    assert code_in("x = 1") == "x = 1"


def test_policies_that_ship_can_be_changed() -> None:
    for path in sorted((Path(__file__).parents[3] / "policies/zoo").glob("[a-z]*.py")):
        source = path.read_text(encoding="utf-8")
        for seed in range(5):
            ast.parse(mutate(source, random.Random(seed)).source)
