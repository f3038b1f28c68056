"""A tokenizer is read as an earlier start has kept it, where it gives the same, and else anew."""

import copy
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from aioserve.config import ModelConfig
from aioserve.errors import ConfigError
from aioserve.model_source import kept_tokenizer
from aioserve.model_source.directory import Directory
from aioserve.model_source.info import ModelInfo
from aioserve.model_source.kept_tokenizer import KeptTokenizer
from tests.gguf_models import CHAT_TEMPLATE, write_gguf
from tests.models import make_model

EMBEDDED = ModelInfo(ModelConfig()).source.path
TEXT = "What news,  my lord? \u00dcber w3000\n<|end|> \U0001f600"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which tokenizers are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "aioserve" / "tokenizers"


@pytest.fixture
def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Grows with each tokenizer that is read by `transformers`."""
    reads: list[Path] = []
    read = Directory.read_tokenizer

    def counted(directory: Directory) -> Any:
        reads.append(directory.path)
        return read(directory)

    monkeypatch.setattr(Directory, "read_tokenizer", counted)
    return reads


def tokenizer_of(path: Path, **settings: Any) -> Any:
    return ModelInfo(ModelConfig(model=str(path), **settings)).tokenizer


def byte_level(backend: Tokenizer) -> dict[str, Any]:
    backend.pre_tokenizer = pre_tokenizers.ByteLevel()
    backend.decoder = decoders.ByteLevel()
    return {"eos_token": "<e>", "extra_special_tokens": ["<x>", "<y>"]}


def with_bos(backend: Tokenizer) -> dict[str, Any]:
    backend.add_special_tokens(["<s>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    return {"bos_token": "<s>", "add_bos_token": True}


def sentence_piece(backend: Tokenizer) -> dict[str, Any]:
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_tokens([AddedToken("<tool>", lstrip=True), AddedToken("<b>", rstrip=True)])
    return {}


def limited(backend: Tokenizer) -> dict[str, Any]:
    backend.enable_truncation(4)
    backend.enable_padding(length=8, pad_token="a", pad_id=0)
    return {}


def model_of(kind: Callable[[Tokenizer], dict[str, Any]], path: Path) -> Path:
    shutil.copytree(EMBEDDED, path)
    letters = [*pre_tokenizers.ByteLevel.alphabet(), "\u2581", " "]
    backend = Tokenizer(models.BPE({text: i for i, text in enumerate(letters)}, []))
    more = kind(backend)
    whole = PreTrainedTokenizerFast(tokenizer_object=backend, **more)
    whole.save_pretrained(path)
    return path


def words(path: Path) -> Path:
    """A model with a tokenizer of `transformers` that cleans up the spaces in its texts."""
    shutil.copytree(EMBEDDED, path)
    vocab = ["[UNK]", "we", "'", "ve", "it", ",", "do", "n", "t", "?", ".", "a"]
    backend = Tokenizer(models.WordPiece({w: i for i, w in enumerate(vocab)}, unk_token="[UNK]"))
    backend.pre_tokenizer, backend.decoder = (
        pre_tokenizers.BertPreTokenizer(),
        decoders.WordPiece(cleanup=False),
    )
    whole = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=True)
    whole.save_pretrained(path)
    return path


@pytest.mark.parametrize("kind", [byte_level, with_bos, sentence_piece, limited])
def test_a_kept_tokenizer_gives_what_that_of_transformers_gives(
    kind: Callable[[Tokenizer], dict[str, Any]],
    tmp_path: Path,
    own_cache: Path,
    count_reads: list[Path],
) -> None:
    path = model_of(kind, tmp_path / "model")
    chosen = AutoTokenizer.from_pretrained(path)
    for _ in range(2):
        tokenizer = tokenizer_of(path)
        assert isinstance(tokenizer, KeptTokenizer)
        for special in (False, True):
            ids = chosen.encode(TEXT, add_special_tokens=special)
            assert tokenizer.encode(TEXT, add_special_tokens=special) == ids
            assert tokenizer.decode(ids) == chosen.decode(ids)
            assert tokenizer.decode(ids, skip_special_tokens=True) == chosen.decode(
                ids, skip_special_tokens=True
            )
            assert tokenizer.convert_ids_to_tokens(ids) == chosen.convert_ids_to_tokens(ids)
        assert tokenizer.get_vocab() == chosen.get_vocab()
        assert tokenizer.get_added_vocab() == chosen.get_added_vocab()
        assert tokenizer.special_tokens_map == chosen.special_tokens_map
        assert tokenizer.chat_template == chosen.chat_template
        assert len(tokenizer) == len(chosen)
    assert count_reads == [path]
    (file,) = own_cache.iterdir()
    assert (file.stat().st_mode & 0o777, own_cache.stat().st_mode & 0o777) == (0o600, 0o700)


def test_what_else_a_program_asks_is_answered_by_the_tokenizer_of_transformers(
    tmp_path: Path, count_reads: list[Path]
) -> None:
    path = model_of(byte_level, tmp_path / "model")
    tokenizer_of(path)
    tokenizer, chosen = tokenizer_of(path), AutoTokenizer.from_pretrained(path)
    ids = tokenizer.encode("a b")
    assert count_reads == [path]
    assert tokenizer.eos_token_id == chosen.eos_token_id
    assert tokenizer(["a", "b c"])["input_ids"] == chosen(["a", "b c"])["input_ids"]
    assert tokenizer.encode("a", "b") == chosen.encode("a", "b")
    assert tokenizer.decode([ids, ids[:1]]) == chosen.decode([ids, ids[:1]])
    assert tokenizer.decode(ids[0]) == chosen.decode(ids[0])
    assert tokenizer.convert_ids_to_tokens(ids, skip_special_tokens=True) == (
        chosen.convert_ids_to_tokens(ids, skip_special_tokens=True)
    )
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = tokenizer.no_such_thing
    assert count_reads == [path, path]


def test_what_a_program_changes_is_in_every_later_answer(tmp_path: Path) -> None:
    path = model_of(byte_level, tmp_path / "model")
    tokenizer_of(path)
    tokenizer, chosen = tokenizer_of(path), AutoTokenizer.from_pretrained(path)
    for one in (tokenizer, chosen):
        one.add_tokens(["<new>"])
        one.padding_side = "left"
        one.pad_token = one.eos_token
    ids = chosen.encode("a <new>")
    assert tokenizer.encode("a <new>") == ids
    assert tokenizer.decode(ids) == chosen.decode(ids)
    assert tokenizer.convert_ids_to_tokens(ids) == chosen.convert_ids_to_tokens(ids)
    assert tokenizer.get_vocab() == chosen.get_vocab()
    assert tokenizer.get_added_vocab() == chosen.get_added_vocab()
    assert len(tokenizer) == len(chosen)
    padded = tokenizer(["a", "b c d"], padding=True, truncation=True, max_length=2)
    assert (
        padded["input_ids"]
        == chosen(["a", "b c d"], padding=True, truncation=True, max_length=2)["input_ids"]
    )
    assert tokenizer.encode("a b c d") == chosen.encode("a b c d")


def test_a_tokenizer_of_transformers_that_cannot_be_made_is_an_error_that_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model_of(byte_level, tmp_path / "model")
    tokenizer_of(path)
    tokenizer = tokenizer_of(path)

    def fail(*args: object, **more: object) -> None:
        raise AttributeError("no such part")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", fail)
    with pytest.raises(ConfigError, match="no such part"):
        _ = tokenizer.eos_token_id


def test_a_chat_template_of_the_settings_is_that_of_every_answer(tmp_path: Path) -> None:
    path = model_of(byte_level, tmp_path / "model")
    (file := tmp_path / "own.jinja").write_text("{{ messages[0].content }}!")
    tokenizer_of(path)
    plain, other = tokenizer_of(path), tokenizer_of(path, chat_template=str(file))
    chat = [{"role": "user", "content": "a"}]
    assert other.get_chat_template() == file.read_text()
    assert other.apply_chat_template(chat, tokenize=False) == "a!"
    copied = copy.copy(other)
    copied.chat_template = "b"
    assert copied.apply_chat_template(chat, tokenize=False) == "b"
    assert other.apply_chat_template(chat, tokenize=False) == "a!"
    assert plain.chat_template == (EMBEDDED / "chat_template.jinja").read_text()


def test_of_several_chat_templates_tools_choose(tmp_path: Path) -> None:
    path = model_of(byte_level, tmp_path / "model")
    folder = path / "additional_chat_templates"
    folder.mkdir()
    (folder / "tool_use.jinja").write_text("with tools")
    chosen = AutoTokenizer.from_pretrained(path)
    for _ in range(2):
        tokenizer = tokenizer_of(path)
        assert isinstance(tokenizer, KeptTokenizer)
        assert tokenizer.get_chat_template() == chosen.get_chat_template()
        assert tokenizer.get_chat_template(tools=[{}]) == "with tools"
    (folder / "tool_use.jinja").write_text("others")
    assert tokenizer_of(path).get_chat_template(tools=[{}]) == "others"


def test_the_tokenizer_of_a_gguf_file_is_kept(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(make_model("llama", tmp_path / "model"), tmp_path / "m.gguf")
    first = tokenizer_of(path)
    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.from_pretrained", None)
    again = tokenizer_of(path)
    assert again.chat_template == CHAT_TEMPLATE
    assert again.encode(TEXT) == first.encode(TEXT)
    assert again.special_tokens_map == first.special_tokens_map


def test_what_gives_other_texts_without_transformers_is_not_kept(
    tmp_path: Path, own_cache: Path, count_reads: list[Path]
) -> None:
    path = words(tmp_path / "model")
    for _ in range(2):
        tokenizer = tokenizer_of(path)
        assert tokenizer.decode(tokenizer.encode("do n't it ?")) == "don't it?"
    assert count_reads == [path, path]
    assert not own_cache.exists()


def test_none_is_kept_unasked_or_with_code_of_its_own(tmp_path: Path, own_cache: Path) -> None:
    path = model_of(byte_level, tmp_path / "model")
    tokenizer_of(path, keep_prepared=False)
    tokenizer_of(path, trust_remote_code=True)
    assert not own_cache.exists()


def test_other_files_are_another_tokenizer(tmp_path: Path, own_cache: Path) -> None:
    path = model_of(byte_level, tmp_path / "model")
    first = tokenizer_of(path)
    stated = json.loads((path / "tokenizer.json").read_text())
    times = (path / "tokenizer.json").stat()
    stated["normalizer"] = {"type": "Lowercase"}
    (path / "tokenizer.json").write_text(json.dumps(stated))
    os.utime(path / "tokenizer.json", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert tokenizer_of(path).encode("ABC") == first.encode("abc") != first.encode("ABC")
    assert len(list(own_cache.iterdir())) == 1  # it has taken the place of the old one


@pytest.mark.parametrize("damage", ["cut", "empty", "foreign", "backend"])
def test_a_damaged_file_of_a_tokenizer_is_done_without(
    damage: str, tmp_path: Path, own_cache: Path, count_reads: list[Path]
) -> None:
    path = model_of(byte_level, tmp_path / "model")
    first = tokenizer_of(path)
    (file,) = own_cache.iterdir()
    data = file.read_bytes()
    damaged = {
        "cut": data[: len(data) // 2],
        "empty": b"",
        "foreign": b"GGUF" + data[4:],
        "backend": data.replace(b'"ByteLevel"', b'"ByteSevel"'),
    }
    file.write_bytes(damaged[damage])
    assert tokenizer_of(path).encode(TEXT) == first.encode(TEXT)
    tokenizer_of(path)
    assert count_reads == [path, path]  # it was written anew


def test_without_a_home_or_a_folder_a_tokenizer_is_read_all_the_same(
    tmp_path: Path,
    own_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = model_of(byte_level, tmp_path / "model")
    caplog.set_level(logging.INFO)
    own_cache.parent.parent.mkdir()
    own_cache.parent.write_text("no folder")
    ids = tokenizer_of(path).encode(TEXT)
    assert [line for line in caplog.messages if "is not kept for the next start" in line]

    def homeless(name: str) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(kept_tokenizer, "user_cache", homeless)
    assert tokenizer_of(path).encode(TEXT) == ids
