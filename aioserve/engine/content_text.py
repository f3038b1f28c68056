"""Text of clients in a chat prompt that spells a control token, and is to be read as text.

What a template writes itself stays a control; between the two it cannot be told in a rendered
prompt. So contents are marked before they are rendered, and the marks tell where no control is.
Loaded for the setting `model.content_special_tokens`. Knows the tokenizer and conversations.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from itertools import groupby
from typing import Any, NamedTuple

import msgspec

from aioserve.engine.chat_template import template_of
from aioserve.engine.prompt import MARK, unmarked
from aioserve.errors import ConfigError

_BEGINNING = "\ue0fd\uf8fd\ue0fd"  # of what stands behind a control; no vocabulary has it
# Of messages and their parts: what templates compare, and no model reads as text.
_NAMES = ("role", "type")


class _Control(NamedTuple):
    """A token of chat prompts that is none of their text."""

    text: str
    token_id: int
    is_special: bool  # else it is text elsewhere: `<tool_call>`
    takes_space_before: bool
    takes_space_behind: bool


class ContentText:
    """Marks conversations, and encodes the prompts that a template has made of them."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is one of `transformers`. Its controls are the added tokens that it flags as
        special, and those that its chat template writes.

        Raises `ConfigError` for one that is not fast, or that spells a control in no other way.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError("model.content_special_tokens: text needs a fast tokenizer")
        controls = _controls(backend, template_of(tokenizer))
        self._backend = backend
        self._all = _Finder(controls)
        self._special = _Finder([control for control in controls if control.is_special])
        self._plain, self._beginning = _without(backend, {control.text for control in controls})
        for control in controls:
            if control.token_id in self._encode_plain(control.text, is_first=True):
                raise ConfigError(
                    "model.content_special_tokens: text is not possible with this tokenizer, which "
                    f"has no other tokens for {control.text!r}"
                )

    def marked(self, conversation: Any) -> Any:
        """Return a `Conversation` whose texts hold marks where they spell controls. What the
        assistant said may hold those that are text elsewhere: templates look for `</think>` in it.
        """
        messages = [self._marked_message(message) for message in conversation.messages]
        return msgspec.structs.replace(
            conversation,
            messages=messages,
            tools=_mapped(conversation.tools, self._all),
            template_kwargs=_mapped(conversation.template_kwargs, self._all),
        )

    def encode(self, prompt: str) -> list[int]:
        """Return the token ids of a rendered prompt with marks in it."""
        ids: list[int] = []
        pieces = list(self._all.split(prompt))
        at = 0
        for is_marked, group in groupby(pieces, lambda piece: MARK in piece[0]):
            run = list(group)
            before = pieces[at - 1][1] if at else None
            at += len(run)
            behind = pieces[at][1] if at < len(pieces) else None
            if not is_marked:
                text = "".join(text for text, _ in run)
                encode = self._backend.encode_batch_fast
                ids += encode([text], add_special_tokens=False)[0].ids
                continue
            [(text, _)] = run  # between two controls, or at an end
            text = unmarked(text)
            if before is not None and before.takes_space_behind:
                text = text.lstrip()
            if behind is not None and behind.takes_space_before:
                text = text.rstrip()
            ids += self._encode_plain(text, is_first=before is None)
        return ids

    def _encode_plain(self, text: str, *, is_first: bool) -> list[int]:
        """Return a text without controls. Behind one, some tokenizers put no space before it."""
        encode = self._plain.encode_batch_fast
        if is_first or not text:
            return list(encode([text], add_special_tokens=False)[0].ids)
        ids: list[int] = encode([_BEGINNING + text], add_special_tokens=False)[0].ids
        assert ids[0] == self._beginning, "it is an added token"
        return ids[1:]

    def _marked_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        said = self._special if message.get("role") == "assistant" else self._all
        marked = {key: _mapped(value, said) for key, value in message.items() if key not in _NAMES}
        if "tool_calls" in message:
            marked["tool_calls"] = _mapped(message["tool_calls"], self._all)
        return {**message, **marked}


class _Finder:
    """Finds controls in texts, in one pass however many there are and whatever stands there."""

    def __init__(self, controls: Collection[_Control]) -> None:
        from tokenizers import AddedToken, Tokenizer
        from tokenizers.models import WordLevel

        self._controls = list(controls)
        other = "?"
        self._finder = Tokenizer(WordLevel({other: 0}, unk_token=other))
        texts = [control.text for control in self._controls]
        self._finder.add_tokens([AddedToken(text, normalized=False) for text in texts])
        self._heads = {text[:n] for text in texts for n in range(1, len(text))}
        self._tails = {text[-n:] for text in texts for n in range(1, len(text))}
        self._longest = max(map(len, texts), default=1)

    def split(self, text: str) -> Iterator[tuple[str, _Control | None]]:
        """Yield the pieces of a text in their order, each with the control that it is."""
        found = self._finder.encode(text, add_special_tokens=False)
        for token_id, (start, end) in zip(found.ids, found.offsets, strict=True):
            yield text[start:end], self._controls[token_id - 1] if token_id else None

    def marked(self, text: str) -> str:
        """Return a text with marks in every control, and where it may become one with its
        neighbours.
        """
        pieces = [
            MARK.join(piece) + MARK if control is not None else piece
            for piece, control in self.split(text)
        ]
        begun, ended = text.lstrip(), text.rstrip()
        lengths = range(1, min(self._longest, len(text) + 1))
        if any(begun[:n] in self._tails for n in lengths):
            pieces.insert(0, MARK)
        if any(ended[-n:] in self._heads for n in lengths):
            pieces.append(MARK)
        return "".join(pieces)


def _mapped(value: Any, finder: _Finder) -> Any:
    """Return a value of JSON with marks in its texts."""
    if isinstance(value, str):
        return finder.marked(value)
    if isinstance(value, Mapping):
        return {
            _mapped(key, finder): each if key in _NAMES else _mapped(each, finder)
            for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [_mapped(each, finder) for each in value]
    return value


def _controls(backend: Any, template: str) -> list[_Control]:
    return [
        _Control(token.content, token_id, token.special, token.lstrip, token.rstrip)
        for token_id, token in backend.get_added_tokens_decoder().items()
        if len(token.content) > 1
        and token.content.strip()
        and (token.special or token.content in template)
    ]


def _without(backend: Any, texts: Collection[str]) -> tuple[Any, int | None]:
    """Return a copy of a tokenizer that knows these added tokens no more, and all others by the
    same ids; and the id of what stands for a control before a text.
    """
    from tokenizers import AddedToken, Tokenizer

    state = json.loads(backend.to_str())
    vocab = state["model"]["vocab"]
    known = {*(vocab if isinstance(vocab, dict) else (token for token, _ in vocab))}
    gone = known.intersection(texts)  # the model spells nothing by them
    added = [token for token in state["added_tokens"] if token["content"] not in gone]
    for token in added:
        if token["content"] in texts:  # its place is kept: those behind it are numbered on
            token |= {"content": f"{MARK}{token['id']}{MARK}", "special": False}
    plain = Tokenizer.from_str(json.dumps({**state, "added_tokens": added}))
    plain.no_padding()
    plain.no_truncation()
    plain.add_tokens([AddedToken(_BEGINNING, normalized=False)])
    return plain, plain.token_to_id(_BEGINNING)
