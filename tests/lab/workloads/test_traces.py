"""Traces: three formats are read, and a broken line is named by file and number."""

from pathlib import Path

import pytest

from aioserve.errors import ConfigError
from aioserve.lab.workloads.traces import read_trace
from aioserve.lab.workloads.workload import build_prompt

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:48.0000000,12,3
"""
MOONCAKE = """{"timestamp": 1000, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]}
{"timestamp": 3000, "input_length": 512, "output_length": 9, "hash_ids": [1]}
"""
LOG = """{"arrival": 1.5, "prompt_tokens": 10, "output_tokens": 4}

{"arrival": 1.0, "prompt_tokens": 3, "output_tokens": 2, "priority": -1, "user": "a", "timeout": 2}
"""


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_azure_rows_become_requests_in_order_of_time(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, "a.csv", AZURE))
    assert trace.is_trace
    assert [r.arrival for r in trace.requests] == pytest.approx([0.0, 1.31941, 4.314579], abs=1e-6)
    assert [(r.num_prompt_tokens, r.output_tokens) for r in trace.requests] == [
        (374, 44),
        (12, 3),
        (396, 109),
    ]


def test_time_zones_of_the_2024_traces_are_read(tmp_path: Path) -> None:
    text = AZURE.replace("6805900,", "680590+00:00,").split("\n")
    trace = read_trace(write(tmp_path, "a.csv", "\n".join(text[:2])))
    assert len(trace.requests) == 1


def test_equal_hash_ids_of_mooncake_are_equal_prefixes(tmp_path: Path) -> None:
    first, second = read_trace(write(tmp_path, "m.jsonl", MOONCAKE)).requests
    assert (first.arrival, second.arrival) == (0.0, 2.0)
    a, b = build_prompt(first, 2048, {}), build_prompt(second, 2048, {})
    assert (len(a), len(b)) == (700, 512)
    assert a[:512] == b


def test_request_logs_are_read_with_all_fields(tmp_path: Path) -> None:
    early, late = read_trace(write(tmp_path, "l.jsonl", LOG)).requests
    assert (early.priority, early.user, early.timeout) == (-1, "a", 2.0)
    assert (late.arrival, late.num_prompt_tokens, late.output_tokens) == (0.5, 10, 4)


def test_another_seed_is_the_same_traffic_with_other_tokens(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", AZURE)
    one, two = read_trace(path, 1).requests, read_trace(path, 2).requests
    assert [r.num_tokens for r in one] == [r.num_tokens for r in two]
    assert one[0].pieces != two[0].pieces


@pytest.mark.parametrize(
    ("name", "text", "where", "what"),
    [
        ("a.csv", AZURE + "2023-11-16 18:16:00,12\n", ":5", "expected 3 columns, got 2"),
        ("a.csv", AZURE + "yesterday,12,3\n", ":5", "Invalid isoformat"),
        ("a.csv", AZURE.replace("374", "many"), ":2", "ContextTokens"),
        ("a.csv", AZURE.replace("374", "0"), ":2", "ContextTokens"),
        ("a.csv", "time,in,out\n", ":1", "TIMESTAMP,ContextTokens,GeneratedTokens"),
        ("a.csv", "", ":1", "TIMESTAMP"),
        ("m.jsonl", MOONCAKE + "{not json\n", ":3", "malformed"),
        ("m.jsonl", MOONCAKE + '{"timestamp": 1}\n', ":3", "input_length"),
        ("m.jsonl", MOONCAKE.replace("[1, 2]", "[1]"), ":1", "700 tokens are 2 blocks of 512"),
        ("l.jsonl", LOG.replace('"arrival": 1.0', '"arrival": -1'), ":3", ">= 0"),
        ("l.jsonl", LOG.replace("priority", "prio"), ":3", "prio"),
        ("l.jsonl", "\n", "l.jsonl", "has no requests"),
    ],
)
def test_a_broken_line_is_named_by_file_and_number(
    tmp_path: Path, name: str, text: str, where: str, what: str
) -> None:
    path = write(tmp_path, name, text)
    with pytest.raises(ConfigError) as refusal:
        read_trace(path)
    assert f"{path}{where}" in str(refusal.value) or where == name
    assert what in str(refusal.value)


def test_a_missing_or_binary_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read trace .*none\.csv"):
        read_trace(tmp_path / "none.csv")
    (tmp_path / "b.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_trace(tmp_path / "b.csv")
