"""The page's JavaScript has the words and the places of what the server sends it."""

import re

import pytest

from aioserve.apis.page import FOLDER
from aioserve.engine.live_feed import (
    About,
    Back,
    Came,
    Ended,
    Gauges,
    Histograms,
    Planned,
    Shadow,
    Stands,
    Switched,
    Waits,
)
from aioserve.outputs import FinishReason
from aioserve.request import WaitReason
from tests.server.page import frame_types

#: What the page calls a field that has another name in `engine.live_feed`.
SHORTER = {
    "id": {"shown_id", "step_id"},
    "step": {"step_id"},
    "prompt": {"num_prompt_tokens"},
    "max": {"max_tokens"},
    "total": {"num_tokens"},
    "counts": {"tokens"},
    "used": {"num_used_blocks"},
    "output": {"num_output_tokens"},
}

#: By the struct, the text before and behind the list of names that the page gives to its places.
DECODED = {
    Came: ("const asCame = ([", "])"),
    Planned: ("const asPlanned = ([", "])"),
    Stands: ("for (const [", "] of frame.requests)"),
    Back: ("  takeResult([", "])"),
    Waits: ("for (const [", "] of waits)"),
    Ended: ("for (const [", "] of ended)"),
    Switched: ("for (const [", "] of switched)"),
}


def source(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def keys_of(name: str) -> set[str]:
    """The keys of an object of words.js."""
    found = re.search(rf"^export const {name} = \{{(.*?)\}};$", source("words.js"), re.M | re.S)
    assert found is not None, f"words.js has no {name}"
    return set(re.findall(r'(\w+): "', found[1]))


def is_same(name: str, field: str) -> bool:
    """Whether the page's name stands for the field."""
    return field in SHORTER.get(name, ()) or field in (name, f"num_{name}")


def test_every_reason_to_wait_has_words() -> None:
    assert keys_of("REASONS") == {reason.value for reason in WaitReason}


def test_every_end_of_a_request_has_words() -> None:
    assert keys_of("ENDS") == {reason.value for reason in FinishReason}


@pytest.mark.parametrize("struct", DECODED, ids=lambda struct: struct.__name__)
def test_each_place_of_a_row_is_read_as_its_field(struct: type) -> None:
    before, behind = map(re.escape, DECODED[struct])
    (names,) = re.findall(rf"{before}([\w, ]+){behind}", source("life.js") + source("story.js"))
    read, fields = names.split(", "), list(struct.__struct_fields__)  # type: ignore[attr-defined]
    assert len(read) == len(fields), (read, fields)
    assert [pair for pair in zip(read, fields, strict=True) if not is_same(*pair)] == []


def test_what_is_read_by_its_number_is_the_field_that_is_meant() -> None:
    """The arrival of a request, and when a step was planned and was back."""
    text = source("story.js")
    assert set(re.findall(r"\b(?:row|back\[i\])\[\d\]", text)) == {"row[1]", "row[6]", "back[i][1]"}
    assert Came.__struct_fields__[6] == "arrival"
    assert Planned.__struct_fields__[1] == Back.__struct_fields__[1] == "time"


def test_a_gauge_that_is_read_is_sent() -> None:
    known = {
        "gauges": Gauges.__struct_fields__,
        "about": About.__struct_fields__,
        "shadow": Shadow.__struct_fields__,
    }
    assert Histograms.__struct_fields__ == ("first_token", "gap", "whole")
    for path in sorted(FOLDER.glob("*.js")):
        for owner, field in re.findall(r"\b(gauges|about|shadow)\.(\w+)", source(path.name)):
            assert field in known[owner], f"{path.name} reads {owner}.{field}"


def test_the_types_of_frames_are_those_of_the_structs() -> None:
    """Else: python -m tests.server.page.frame_types."""
    assert frame_types.PATH.read_text(encoding="utf-8") == frame_types.declarations()
