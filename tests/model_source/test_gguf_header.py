"""The head of a GGUF file is read whole, or refused; never half, and never without end."""

import random
from pathlib import Path

import gguf
import pytest

from aioserve.errors import ConfigError
from aioserve.features.gguf.header import read_header
from tests.gguf_models import write_gguf
from tests.models import make_model


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("header")
    return write_gguf(make_model("llama", folder), folder / "whole.gguf")


def test_it_says_what_the_reader_of_llama_cpp_says(whole: Path) -> None:
    header, reader = read_header(whole), gguf.GGUFReader(whole)
    for tensor, other in zip(header.tensors, reader.tensors, strict=True):
        assert tensor.name == other.name
        assert tensor.shape == tuple(map(int, reversed(other.shape)))
        assert (tensor.offset, tensor.num_bytes) == (other.data_offset, other.n_bytes)
    for name, value in header.metadata.items():
        theirs = reader.get_field(name).contents()
        assert value == (len(theirs) if name.endswith(("tokens", "merges")) else theirs)


def test_wherever_it_is_cut_it_is_refused(whole: Path, tmp_path: Path) -> None:
    data, cut = whole.read_bytes(), tmp_path / "cut.gguf"
    end = read_header(whole).tensors[0].offset
    last = read_header(whole).tensors[-1]
    for size in [*range(4, end, 97), end, last.offset, last.offset + last.num_bytes - 1]:
        cut.write_bytes(data[:size])
        with pytest.raises(ConfigError, match="is cut short or damaged"):
            read_header(cut)


def test_whatever_is_in_it_reading_ends_with_a_header_or_a_refusal(
    whole: Path, tmp_path: Path
) -> None:
    data, damaged = whole.read_bytes(), tmp_path / "damaged.gguf"
    end = read_header(whole).tensors[0].offset
    rng = random.Random(5)
    refusals = []
    for _ in range(300):
        bad = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            bad[rng.randrange(4, end)] = rng.choice([0, 1, 0x7F, 0xFF, rng.randrange(256)])
        damaged.write_bytes(bad)
        try:
            read_header(damaged)
        except ConfigError as error:
            refusals.append(str(error))
    assert len(refusals) > 30
    assert all(str(damaged) in refusal and "\n" not in refusal for refusal in refusals)


@pytest.mark.parametrize(
    ("type_id", "reason"),
    [
        (99, "'output_norm.weight' is stored as type 99, which the package gguf does not know"),
        (4, "'output_norm.weight' is stored as type 4, which"),  # it was Q4_2 once
        (12, r"is damaged: tensor 'output_norm.weight' has the shape \(64,\)"),  # Q4_K, of 256
        (23, r"is damaged: tensor 'output_norm.weight' has the shape \(64,\)"),  # IQ4_XS, of 256
    ],
)
def test_a_type_that_is_not_known_or_does_not_divide_a_row_is_refused(
    whole: Path, tmp_path: Path, type_id: int, reason: str
) -> None:
    data, bad = bytearray(whole.read_bytes()), tmp_path / "bad.gguf"
    name = b"output_norm.weight"
    at = data.index(name) + len(name) + 4 + 8  # after the number of dimensions, which is one
    assert int.from_bytes(data[at : at + 4], "little") == gguf.GGMLQuantizationType.F32
    data[at : at + 4] = type_id.to_bytes(4, "little")
    bad.write_bytes(data)
    with pytest.raises(ConfigError, match=reason):
        read_header(bad)
