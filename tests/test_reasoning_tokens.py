"""Reasoning tokens are counted as the parser of reasoning reads the same reply."""

from hypothesis import given
from hypothesis import strategies as st

from aioserve.config import ModelConfig
from aioserve.features.formats import MARKS, Marks, Reasoning, ReasoningParser, joined
from aioserve.model_source.info import ModelInfo
from aioserve.support.reasoning_tokens import ReasoningTokens
from aioserve.support.tokens import TokenBytes

# Marks, beginnings of them, space, text, and a character of several bytes.
PIECES = ["<think>", "</think>", "[/THINK]", "<", "</", "/th", "think", "ink>", ">", " ", "\n", "a"]
REPLIES = st.lists(st.sampled_from([*PIECES, "漢"]), max_size=24).map("".join)


def cut(text: bytes, places: list[int]) -> list[bytes]:
    """The text in pieces that end at these places; some are empty."""
    ends = sorted(place % (len(text) + 1) for place in places)
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


def counted(marks: str, prompt: str, tokens: list[bytes]) -> ReasoningTokens:
    pieces = dict(enumerate([prompt.encode(), *tokens]))
    counter = ReasoningTokens(MARKS[marks], pieces, [0])
    for token_id in range(1, len(tokens) + 1):
        counter.append(token_id)
    return counter


@given(
    st.sampled_from(["deepseek_r1", "qwen3"]),
    st.sampled_from(["Hi", "<think>\n", "<think>\n\n</think>\n\n"]),
    REPLIES,
    st.lists(st.integers(0, 999), max_size=30),
)
def test_counter_and_parser_agree_where_reasoning_ends_however_the_text_is_cut(
    name: str, prompt: str, text: str, places: list[int]
) -> None:
    marks, reply, tokens = MARKS[name], text.encode(), cut(text.encode(), places)
    counter, parser = counted(name, prompt, tokens), ReasoningParser(marks, prompt)
    is_open = parser.is_open
    parser.append(text)
    assert counter.is_inside == (parser.is_open and (is_open or marks.start in text))

    begin = 0
    if not is_open:
        start = text.find(marks.start)
        begin = len(text[: start + len(marks.start)].encode()) if counter.is_begun else len(reply)
        if counter.is_begun and (start < 0 or text[:start].strip()):
            begin = len(reply)  # it begins with something else
    end = reply.find(marks.end.encode(), begin)
    end = len(reply) if end < 0 else end
    place, expected, after_mark = 0, 0, 0
    for token in tokens:
        # An empty token is reasoning if it stands inside of it.
        is_inside = max(place, begin) < min(place + len(token), end)
        expected += is_inside
        after_mark += not token and begin <= place <= end
        place += len(token)
    assert expected <= counter.count <= expected + after_mark


def test_a_mark_that_is_cut_by_tokens_is_no_reasoning() -> None:
    for tokens, count in (
        ([b"</think>"], 0),
        ([b"Hm", b".", b"</", b"think", b">"], 2),
        ([b"Hm", b".</", b"think", b">\n\nSo"], 2),  # the second holds a full stop
        ([b"a", b"<", b"/", b"b", b"</think>", b"c"], 4),
        ([b"Hm", b"</", b"thi"], 3),  # it may still become something else
    ):
        assert counted("qwen3", "<think>\n", tokens).count == count, tokens


def test_what_is_told_of_tokens_in_between_never_falls() -> None:
    pieces = dict(enumerate([b"<think>", b"a<", b"b", b"</", b"x", b"</thi", b"nk>", b"So"]))
    counter, told = ReasoningTokens(MARKS["qwen3"], pieces, [0]), []
    for token_id in range(1, 8):
        counter.append(token_id)
        told.append(counter.num_certain)
    assert told == [1, 2, 2, 4, 4, 4, 4]
    assert counter.count == 4


def test_reasoning_that_begins_again_is_counted_again() -> None:
    marks = Marks("<analysis>", "<end>", is_repeated=True)
    said = [b"Hi", b"<ana", b"lysis>", b"Hm", b".", b"<end>", b"So", b"<analysis>", b"x<e", b"nd>"]
    counter = ReasoningTokens(marks, dict(enumerate(said)), ())
    inside = []
    for token_id in range(len(said)):
        counter.append(token_id)
        inside.append(counter.is_inside)
    assert counter.count == 3
    assert not counter.is_over
    assert inside == [False, False, True, True, True, False, False, True, True, False]


def test_states_are_taken_back_as_if_nothing_had_come() -> None:
    counter = counted("qwen3", "<think>", [b"Hm", b"</", b"think>", b"x"])
    assert (counter.count, counter.is_over) == (1, True)
    counter = ReasoningTokens(MARKS["qwen3"], {0: b"<think>", 1: b"Hm", 2: b"</think>"}, [0])
    counter.append(1)
    state = counter.save()
    counter.append(2)
    assert counter.is_over
    counter.restore(state)
    assert counter.is_inside
    assert counter.count == 1


def test_what_is_counted_is_what_the_parser_tells_as_reasoning() -> None:
    tokens = [b"\n", b"I ", b"wonder", b".\n", b"</think>", b"\n\n", b"Yes."]
    parser = ReasoningParser(MARKS["qwen3"], "<think>")
    told = joined([e for token in tokens for e in parser.append(token.decode())])
    assert told[0] == Reasoning("I wonder.")
    assert counted("qwen3", "<think>", tokens).count == 4


def test_bytes_of_tokens_join_to_the_text() -> None:
    text = "Grüße 漢字 🦊 </think> and  spaces"
    tokenizer = ModelInfo(ModelConfig()).tokenizer
    pieces = TokenBytes(tokenizer)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(pieces[token_id] for token_id in token_ids).decode() == text
