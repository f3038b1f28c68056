"""The tokenizer that matchers see: the bytes of each token, and which tokens a text is made of.

Knows which tokens are text and which are controls, and that a forced text is the tokens that the
model would write for it. Knows of grammars only how they name a token.
"""

import copy
import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from aioserve.errors import is_panic
from aioserve.support.tokens import spelled_bytes

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_CONTROL = b"\xff"  # begins no text: llguidance's sign of a token that stands for itself alone
# Characters of a forced text that are made tokens at a time, and how many of those are left out.
_MAX_AHEAD, _NUM_UNSURE = 4096, 16
# What stands in llguidance's Lark: strings, patterns and comments, each to its end or to that of
# the text, so that all of it is looked at once; and names of tokens.
_LARK = re.compile(
    r'"(?:\\.|[^"\\\n])*"?|/(?!/)(?:\\.|[^/\\\n])*/?|(?://|\#)[^\n]*|(<[^<>\s\[\]]+>)'
)


def matching_tokenizer(
    tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]
) -> "LLTokenizer":
    """llguidance's tokenizer for one of `transformers`, of a model with `vocab_size` ids.

    Raises `ValueError` for a tokenizer whose tokens are not known as bytes. It takes the GIL for up
    to a second with a large vocabulary.
    """
    from llguidance import LLTokenizer

    eos = list(eos_token_ids)
    seen: Any = SeenTokenizer(tokenizer, vocab_size, eos)
    return LLTokenizer(seen, eos_token=eos)


def text_tokens(tokenizer: Any, eos_token_ids: Collection[int]) -> dict[str, int]:
    """By name, the added tokens of the form `<...>` that are text, though they seem controls."""
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    controls = _controls(added, eos_token_ids)
    named = {str(token): token_id for token_id, token in added.items() if token_id not in controls}
    return {name: token_id for name, token_id in named.items() if re.fullmatch("<.+>", name)}


def with_ids(grammar: str, tokens: Mapping[str, int]) -> str:
    """Return a grammar, as Lark or as llguidance's JSON, in which these tokens, where a rule names
    one without quotes, stand as their ids: by name llguidance knows controls alone.

    Raises `ValueError` or `RecursionError` for what begins as JSON and is none.
    """
    if not any(name in grammar for name in tokens):
        return grammar

    def written(match: re.Match[str]) -> str:
        token_id = tokens.get(match[1] or "")
        return match[0] if token_id is None else f"<[{token_id}]>"

    if not grammar.lstrip().startswith("{"):
        return _LARK.sub(written, grammar)
    whole = json.loads(grammar)
    for part in whole.get("grammars") or ():
        if isinstance(lark := part.get("lark_grammar"), str):
            part["lark_grammar"] = _LARK.sub(written, lark)
    return json.dumps(whole)


def _controls(added: Mapping[int, Any], eos_token_ids: Collection[int]) -> set[int]:
    """Return the tokens that stand for themselves, in no text: what is flagged so, and what ends
    texts.
    """
    return {token_id for token_id, token in added.items() if token.special}.union(eos_token_ids)


class SeenTokenizer:
    """A tokenizer as llguidance asks for it.

    llguidance's own reading of a tokenizer takes every added token of the form `<...>` for a
    control, though it is text in the replies of the model: Qwen's `<tool_call>` and `<think>`. And
    what it forces, it spells by added tokens that it refuses afterwards, or by a normalizer that
    changes the text. Here a token is a control if the tokenizer flags it `special`, since those are
    left out of texts, or if it ends them; and a text is spelled by tokens that spell it exactly.
    """

    is_tokenizer_wrapper = True  # by which llguidance knows it
    bos_token_id = None

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """Raises `ValueError` for a tokenizer whose tokens are not known as bytes."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError("it is none of the fast ones, those of the library tokenizers")
        self.eos_token_id = eos_token_ids[0]
        self._encoder, decoders = _without_prefix(backend)
        controls = _controls(backend.get_added_tokens_decoder(), eos_token_ids)
        #: Token ids that stand for themselves, in no text.
        self.special_token_ids = sorted(i for i in controls if i < vocab_size)
        self.tokens = _token_bytes(backend.get_vocab(), decoders, vocab_size)
        self._max_token_bytes = max(map(len, self.tokens))

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of `text`, as the model would write it; none of them is a control. Of a
        long text those of its beginning: llguidance asks anew after every token.
        """
        if len(text) <= _MAX_AHEAD:
            return self._spelled(text)
        ids = self._spelled(text[:_MAX_AHEAD])
        # The last ones may be others, with what follows.
        return ids[: max(1, len(ids) - _NUM_UNSURE)]

    def _spelled(self, text: str) -> list[int]:
        # The batch call releases the GIL; "fast" skips offsets, which are not read.
        encode = self._encoder.encode_batch_fast
        try:
            ids: list[int] = encode([text], add_special_tokens=False)[0].ids
        except BaseException as error:
            if not is_panic(error):
                raise
            ids = []  # it cannot read this text
        data, size = text.encode(), len(self.tokens)
        if b"".join(self.tokens[i] if i < size else _CONTROL for i in ids) == data:
            return ids
        return self._longest_first(data)

    def _longest_first(self, data: bytes) -> list[int]:
        """Return the tokens of a text that the tokenizer would change before it encodes it."""
        ids, at = [], 0
        while at < len(data):
            for end in range(min(len(data), at + self._max_token_bytes), at, -1):
                if (token_id := self._id_of.get(data[at:end])) is not None:
                    ids.append(token_id)
                    break
            else:
                end = at + 1  # no token has this byte: no matcher can ask for it
            at = end
        return ids

    @cached_property
    def _id_of(self) -> dict[bytes, int]:
        controls = set(self.special_token_ids)
        known = {t: i for i, t in enumerate(self.tokens) if t and i not in controls}
        return {t: i for t, i in known.items() if not t.startswith(_CONTROL)}


def _without_prefix(backend: Any) -> tuple[Any, list[dict[str, Any]]]:
    """Return a copy of the tokenizer that encodes a piece from the middle of a text, in which
    controls are text as well, and the decoders of the tokenizer.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    parts = Tokenizer(BPE())
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        if (part := getattr(backend, name)) is not None:
            setattr(parts, name, part)
    state = json.loads(parts.to_str())
    decoders = _flat(state["decoder"], "decoders")
    state["normalizer"] = _mended(state["normalizer"])
    state["pre_tokenizer"] = _mended(state["pre_tokenizer"])
    mended = Tokenizer.from_str(json.dumps(state))
    encoder = copy.copy(backend)
    encoder.no_padding()
    encoder.no_truncation()
    encoder.encode_special_tokens = True
    encoder.normalizer, encoder.pre_tokenizer = mended.normalizer, mended.pre_tokenizer
    return encoder, decoders


def _flat(part: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """Return a part of a tokenizer, or all that are in it."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [inner for each in part[key] for inner in _flat(each, key)]


def _mended(part: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a normalizer or pre-tokenizer that puts no space before a text."""
    if part is None or part["type"] == "Prepend":
        return None
    part = dict(part)
    if part["type"] == "Metaspace":
        part["prepend_scheme"] = "never"
    if part["type"] == "ByteLevel" and "add_prefix_space" in part:
        part["add_prefix_space"] = False
    for key in ("normalizers", "pretokenizers"):
        if key in part:
            part[key] = [each for each in map(_mended, part[key]) if each is not None]
    return part


def _token_bytes(
    vocab: dict[str, int], decoders: list[dict[str, Any]], vocab_size: int
) -> list[bytes]:
    """By token id, its bytes; ids without a token are controls."""
    kinds = {decoder["type"] for decoder in decoders}
    if not kinds & {"ByteLevel", "ByteFallback"}:
        raise ValueError(
            "its decoder knows no bytes: neither ByteLevel nor ByteFallback is in "
            f"{sorted(kinds) or 'no decoder at all'}"
        )
    is_byte_level = "ByteFallback" not in kinds
    space = _space(decoders)
    found = [_CONTROL + b"<[%d]>" % token_id for token_id in range(vocab_size)]
    for token, token_id in vocab.items():
        if token_id >= vocab_size:
            continue
        if is_byte_level:
            spelled = spelled_bytes(token)
            found[token_id] = token.encode() if spelled is None else spelled
        elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            found[token_id] = bytes([int(token[3:5], 16)])
        else:
            found[token_id] = (token.replace(space, " ") if space else token).encode()
    return found


def _space(decoders: list[dict[str, Any]]) -> str:
    """Return what stands for a space in the tokens of a SentencePiece vocabulary."""
    for decoder in decoders:
        if decoder["type"] == "Replace" and decoder["content"] == " ":
            return str(decoder["pattern"].get("String", ""))
    return ""
