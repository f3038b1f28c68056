"""Token texts and bytes, with vocabularies that split characters."""

import pytest
from tokenizers import AddedToken

from aioserve.outputs import TokenLogprobs
from aioserve.server.logprobs import chat_logprobs, completion_logprobs
from aioserve.support.tokens import TokenTexts

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """Decodes one token at a time from (decoded text, vocabulary entry) pairs."""

    def __init__(self, *vocabulary: tuple[str, str]) -> None:
        self.vocabulary = vocabulary
        self.num_decoded = 0
        self.added_tokens_decoder = {}

    def decode(self, token_ids):
        self.num_decoded += 1
        return "".join(self.vocabulary[i][0] for i in token_ids)

    def convert_ids_to_tokens(self, token_id):
        return self.vocabulary[token_id][1]


@pytest.mark.parametrize(
    ("text", "token", "expected"),
    [
        ("hello", "hello", b"hello"),
        (" day", "Ġday", b" day"),
        ("é", "Ã©", "é".encode()),
        (REPLACEMENT, "Ã", b"\xc3"),  # byte-level BPE: the first half of é
        (REPLACEMENT, "©", b"\xa9"),
        (REPLACEMENT, "<0xE2>", b"\xe2"),  # SentencePiece's byte fallback
        (REPLACEMENT, "漢", REPLACEMENT.encode()),  # neither: the best that can be said
    ],
)
def test_bytes_are_those_of_the_vocabulary(text, token, expected):
    assert TokenTexts(Tokenizer((text, token)))[0] == (text, list(expected))


def test_a_token_is_decoded_once():
    tokenizer = Tokenizer(("a", "a"))
    texts = TokenTexts(tokenizer)
    assert [texts.text(0), texts.text(0)] == ["a", "a"]
    assert tokenizer.num_decoded == 1


TEXTS = TokenTexts(Tokenizer(("To", "To"), (" be", "Ġbe"), (" or", "Ġor")))
SAMPLED = [
    TokenLogprobs(logprob=-0.1, rank=1, top_token_ids=[0], top_logprobs=[-0.1]),
    TokenLogprobs(logprob=-2.0, rank=2, top_token_ids=[2], top_logprobs=[-0.5]),
]


def test_the_sampled_token_is_among_a_completions_alternatives():
    logprobs, end = completion_logprobs(TEXTS, [0, 1], SAMPLED, 1, offset=10)
    assert logprobs.tokens == ["To", " be"]
    assert logprobs.token_logprobs == [-0.1, -2.0]
    assert logprobs.top_logprobs == [{"To": -0.1}, {" or": -0.5, " be": -2.0}]
    assert (logprobs.text_offset, end) == ([10, 12], 15)


def test_alternatives_of_the_same_text_are_told_apart():
    texts = TokenTexts(Tokenizer((REPLACEMENT, "Ã"), (REPLACEMENT, "Â"), ("a", "a")))
    entry = TokenLogprobs(-3.0, 3, top_token_ids=[0, 2], top_logprobs=[-0.1, -1.0])
    told, _ = completion_logprobs(texts, [1], [entry], 2)
    assert told.top_logprobs == [{"token_id:0": -0.1, "a": -1.0, REPLACEMENT: -3.0}]


def test_offsets_count_characters_that_begin_and_no_tokens_that_the_text_lacks():
    tokenizer = Tokenizer(("<s>", "<s>"), (REPLACEMENT, "Ã"), (REPLACEMENT, "©"), ("!", "!"))
    tokenizer.added_tokens_decoder[0] = AddedToken("<s>", special=True)
    texts, ids = TokenTexts(tokenizer), [0, 1, 2, 3, 0]
    for text, offsets in (("é!<s>", [0, 0, 1, 1, 2]), ("<s>é!", [0, 3, 4, 4, 5])):
        told, _ = completion_logprobs(texts, ids, [None] * 5, 0, text=text)
        assert told.text_offset == offsets


def test_a_chats_alternatives_are_exactly_those_asked_for():
    content = chat_logprobs(TEXTS, [0, 1], SAMPLED).content
    assert [entry.token for entry in content] == ["To", " be"]
    assert [[top.token for top in entry.top_logprobs] for entry in content] == [["To"], [" or"]]
    assert content[1].bytes == list(b" be")
