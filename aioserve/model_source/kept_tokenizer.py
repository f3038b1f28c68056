"""The tokenizer of a model, which starts without `transformers` once an earlier start has kept it.

`transformers` reads the files of a tokenizer in many formats, and takes a second of a processor to
be imported. What it makes of them is a tokenizer of the library `tokenizers`, a chat template and a
few names. These are kept in the user's cache, if they are shown to give the same tokens and texts.
"""

import logging
import random
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import IO, Any, cast

import msgspec

from aioserve.errors import ConfigError, is_panic, one_line
from aioserve.model_source.source import ModelSource
from aioserve.support.kept_files import (
    code_digest,
    digest,
    identities,
    is_own,
    make_room,
    note_read,
    user_cache,
    write_whole,
)

logger = logging.getLogger(__name__)

MOST_BYTES_IN_ALL = 256 << 20  # what was read longest ago goes first

_MAGIC = b"aioserve tokenizer 1\n"
_SUFFIX = ".tokenizer"
_CODE = ("model_source", "features/gguf")  # what decides what a tokenizer is
_FOLDERS = (".", "additional_chat_templates")  # of a model directory, where its files are
# What is compared before a tokenizer is kept: random tokens hold every kind of broken character.
_NUM_SAMPLES, _SAMPLE_TOKENS = 100, 20
# Some texts are cleaned up by some tokenizers of `transformers`, as of spaces before a comma.
_TEXTS = (
    "",
    " a",
    "We 've it , do n't we ?\n",
    "  3.14\t\u00e9\u4f60\U0001f600 \r\n",
    "<s> x\ud7ff",
)
#: Attributes of a kept tokenizer itself; others are those of `transformers`.
_OWN = {"backend_tokenizer", "special_tokens_map", "chat_template", "_read_whole", "_whole"}


class KeptTokenizer:
    """A tokenizer of the library `tokenizers` that answers as the one of `transformers` does.

    What the engine asks is answered here. For whatever else a program asks or sets, the tokenizer
    of `transformers` is read, and answers everything from then on, since it may have been changed.
    """

    def __init__(
        self,
        backend: Any,
        chat_template: str | dict[str, str] | None,
        special_tokens_map: dict[str, str],
        read_whole: Callable[[], Any],
    ) -> None:
        """`backend` is a `tokenizers.Tokenizer`; `read_whole` makes the one of `transformers`."""
        backend.no_truncation()
        backend.no_padding()
        self.backend_tokenizer = backend
        #: Token texts by name, as `eos_token`: what chat templates may write.
        self.special_tokens_map = special_tokens_map
        #: The chat template, or several by name; None: there is none. It may be set.
        self.chat_template = chat_template
        self._read_whole, self._whole = read_whole, cast("Any", None)

    @property
    def whole(self) -> Any:
        """The tokenizer of `transformers`, with the same chat template. Raises `ConfigError` if its
        files are there no more.
        """
        if self._whole is None:
            try:
                self._whole = self._read_whole()
            except AttributeError as error:  # which `__getattr__` would take for its own
                raise ConfigError(f"the tokenizer cannot be read: {one_line(error)}") from error
        self._whole.chat_template = self.chat_template  # a copy of this one may have another
        return self._whole

    def get_chat_template(self, chat_template: str | None = None, tools: Any = None) -> str:
        """Return the template for a chat with these tools, None for none. What names one, or
        finds none, is the business of `transformers`, which raises `ValueError`.
        """
        found = self.chat_template
        if isinstance(found, dict):
            default = found.get("default")
            found = default if tools is None else found.get("tool_use", default)
        if chat_template is not None or found is None:
            return str(self.whole.get_chat_template(chat_template, tools))
        return found

    def encode(self, text: Any, *others: Any, add_special_tokens: bool = True, **more: Any) -> Any:
        """Return the token ids of a text."""
        if self._whole is not None or others or more or not isinstance(text, str):
            more["add_special_tokens"] = add_special_tokens
            return self.whole.encode(text, *others, **more)
        return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(
        self,
        token_ids: Any,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> Any:
        """Return the text of token ids, or of one. No tokenizer that cleans spaces up is kept."""
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        if self._whole is None and not clean_up_tokenization_spaces and _are_ids(ids):
            return self.backend_tokenizer.decode(ids, skip_special_tokens)
        return self.whole.decode(
            token_ids,
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=clean_up_tokenization_spaces,
        )

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        """Return tokens as the vocabulary spells them, None for an id that it does not have."""
        if self._whole is not None or skip_special_tokens:
            return self.whole.convert_ids_to_tokens(ids, skip_special_tokens)
        if isinstance(ids, int):
            return self.backend_tokenizer.id_to_token(ids)
        return [self.backend_tokenizer.id_to_token(int(token_id)) for token_id in ids]

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """The added tokens, by id."""
        if self._whole is not None:
            return dict(self.whole.added_tokens_decoder)
        found: dict[int, Any] = self.backend_tokenizer.get_added_tokens_decoder()
        return found

    def get_vocab(self) -> dict[str, int]:
        """Return the ids of all tokens, those that were added as well."""
        if self._whole is not None:
            return dict(self.whole.get_vocab())
        found: dict[str, int] = self.backend_tokenizer.get_vocab(with_added_tokens=True)
        return found

    def get_added_vocab(self) -> dict[str, int]:
        """Return the ids of the added tokens."""
        return {token.content: i for i, token in sorted(self.added_tokens_decoder.items())}

    def __len__(self) -> int:
        if self._whole is not None:
            return len(self.whole)
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def __call__(self, *args: Any, **more: Any) -> Any:
        return self.whole(*args, **more)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of a copy that is being made, say
            raise AttributeError(name)
        return getattr(self.whole, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.whole, name, value)


def _are_ids(ids: Any) -> bool:
    return isinstance(ids, list | tuple) and all(type(token_id) is int for token_id in ids)


def read_tokenizer(source: ModelSource, *, keep: bool) -> Any:
    """Return the tokenizer of a model: with `keep` as an earlier start has kept it, or as its files
    have it, and then kept for later starts. Raises `ConfigError`.

    None is kept that may be made by code of the model's own, nor that of a model that sees, whose
    processor teaches the tokenizer of `transformers` more tokens.
    """
    known = source.known_config
    if not keep or source.trust_remote_code or not known or "vision_config" in known:
        return source.read_tokenizer()
    try:
        file = _TokenizerFile(source)
    except (OSError, RuntimeError):  # files that cannot be looked at; a user without a home
        return source.read_tokenizer()
    if (kept := file.read(source.read_tokenizer)) is not None:
        return kept
    whole = source.read_tokenizer()
    kept = file.keep(whole, source.read_tokenizer)
    return whole if kept is None else kept


class _Kept(msgspec.Struct, frozen=True):
    """The content of a file."""

    key: str
    backend: str  # as `tokenizers` writes it
    chat_template: str | dict[str, str] | None
    special_tokens_map: dict[str, str]

    def tokenizer(self, read_whole: Callable[[], Any]) -> KeptTokenizer:
        from tokenizers import Tokenizer

        backend = Tokenizer.from_str(self.backend)
        return KeptTokenizer(backend, self.chat_template, self.special_tokens_map, read_whole)


class _TokenizerFile:
    """The file for the tokenizer of one model, there or not."""

    def __init__(self, source: ModelSource) -> None:
        """Raises `OSError` if the model's files cannot be looked at, and `RuntimeError` if the user
        has no home.
        """
        path = source.path
        files = [path]
        if path.is_dir():
            inside = (file for folder in _FOLDERS for file in path.glob(f"{folder}/*"))
            files = [file for file in inside if file.is_file()]
        packages = [version("transformers"), version("tokenizers")]
        name = str(path.absolute())
        self._key = digest([name, identities(files), packages, code_digest(_CODE)])
        self.path = user_cache("tokenizers") / f"{digest([name])[:24]}{_SUFFIX}"

    def read(self, read_whole: Callable[[], Any]) -> KeptTokenizer | None:
        """Return the tokenizer, if it is there. What cannot be read is not there."""
        try:
            with self.path.open("rb") as file:
                if not is_own(file) or file.read(len(_MAGIC)) != _MAGIC:
                    return None
                kept = msgspec.msgpack.decode(file.read(MOST_BYTES_IN_ALL), type=_Kept)
            if kept.key != self._key:
                return None
            tokenizer = kept.tokenizer(read_whole)
        except FileNotFoundError:
            return None
        except BaseException as error:  # whatever is wrong with a file, the model's own are there
            _raise_unless_told(error)
            logger.info("%s is not used: %s", self.path, one_line(error))
            return None
        note_read(self.path)
        return tokenizer

    def keep(self, whole: Any, read_whole: Callable[[], Any]) -> KeptTokenizer | None:
        """Write a tokenizer of `transformers` for the next start, and return it as that will read
        it, so that `whole` takes no more memory; None if it cannot be kept, or would not do the
        same. Raises nothing.
        """
        backend = getattr(whole, "backend_tokenizer", None)
        if backend is None:
            return None
        try:
            template, names = whole.chat_template, dict(whole.special_tokens_map)
            data = msgspec.msgpack.encode(_Kept(self._key, backend.to_str(), template, names))
            kept = msgspec.msgpack.decode(data, type=_Kept).tokenizer(read_whole)
            if not _agree(kept, whole):
                return None

            def write(file: IO[bytes]) -> None:
                file.write(_MAGIC + data)

            write_whole(self.path, write)
            make_room(self.path.parent, _SUFFIX, MOST_BYTES_IN_ALL)
        except BaseException as error:
            _raise_unless_told(error)
            logger.info("the tokenizer is not kept for the next start: %s", one_line(error))
            return None
        return kept


def _agree(kept: KeptTokenizer, whole: Any) -> bool:
    """Return whether both give the same tokens and texts, of random tokens and of all that were
    added.
    """
    rng, size = random.Random(0), len(kept)
    samples = [[rng.randrange(size) for _ in range(_SAMPLE_TOKENS)] for _ in range(_NUM_SAMPLES)]
    samples.append(list(kept.added_tokens_decoder))
    for text in (*_TEXTS, *map(whole.decode, samples)):
        for special in (False, True):
            ids = whole.encode(text, add_special_tokens=special)
            if kept.encode(text, add_special_tokens=special) != ids:
                return False
            samples.append(ids)
    for ids in samples:
        if kept.convert_ids_to_tokens(ids) != whole.convert_ids_to_tokens(ids):
            return False
        for skips in (False, True):
            if kept.decode(ids, skips) != whole.decode(ids, skip_special_tokens=skips):
                return False
    found: Mapping[str, int] = whole.get_vocab()
    return kept.get_vocab() == found and kept.get_added_vocab() == whole.get_added_vocab()


def _raise_unless_told(error: BaseException) -> None:
    """Raise it again if it is neither an error nor a panic of the library."""
    if not isinstance(error, Exception) and not is_panic(error):
        raise error
