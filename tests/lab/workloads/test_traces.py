"""Traces: the first line says the format, and a broken line is named by file and number."""

import json
from pathlib import Path

import pytest

from aioserve.cli.main import main
from aioserve.errors import ConfigError
from aioserve.lab.workloads.traces import read_trace
from aioserve.lab.workloads.workload import build_prompt

SAMPLES = Path(__file__).parent / "traces"  # of each other format a few lines
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:48.0000000,12,3
"""
MOONCAKE = """{"timestamp": 1000, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]}
{"timestamp": 3000, "input_length": 512, "output_length": 9, "hash_ids": [1]}
"""
BURSTGPT = (SAMPLES / "burstgpt.csv").read_text()
BURSTGPT_3 = (SAMPLES / "burstgpt_sessions.csv").read_text()
BAILIAN = (SAMPLES / "qwen_bailian.jsonl").read_text()
WEKA = (SAMPLES / "weka_agents.jsonl").read_text()
LENGTHS = (SAMPLES / "lengths.csv").read_text()
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


def test_column_names_may_be_in_quotes(tmp_path: Path) -> None:
    quoted = AZURE.replace(AZURE.splitlines()[0], '"TIMESTAMP","ContextTokens", GeneratedTokens')
    plain = read_trace(write(tmp_path, "a.csv", AZURE))
    assert read_trace(write(tmp_path, "a.csv", quoted)) == plain


def test_columns_that_are_not_used_may_be_missing_at_the_end_of_a_row(tmp_path: Path) -> None:
    noted = AZURE.replace("GeneratedTokens", "GeneratedTokens,note,more").replace(",44", ",44,x")
    plain = read_trace(write(tmp_path, "a.csv", AZURE))
    assert read_trace(write(tmp_path, "a.csv", noted)) == plain


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


def test_burstgpt_rows_that_were_answered_become_requests(tmp_path: Path) -> None:
    requests = read_trace(write(tmp_path, "b.csv", BURSTGPT)).requests
    assert [(r.arrival, r.num_prompt_tokens, r.output_tokens, r.kind) for r in requests] == [
        (0, 472, 18, "Conversation log"),
        (40, 1087, 230, "Conversation log"),
        (115, 300, 12, "API log"),  # the one before has no response: it failed
    ]
    sessions = read_trace(write(tmp_path, "c.csv", BURSTGPT_3)).requests
    assert [r.session for r in sessions] == [0, 1, 0]
    assert {r.follows for r in sessions} == {-1}


def test_a_turn_of_bailian_comes_after_its_parent_and_shares_its_blocks(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, "q.jsonl", BAILIAN))
    first, search, second = trace.requests
    assert (first.arrival, search.arrival) == (0, 1)
    assert (second.follows, second.arrival) == (0, 7.5)  # the pause between the two arrivals
    assert [r.session for r in trace.requests] == [0, 1, 0]
    assert [*trace.all_classes] == ["text", "search"]
    a, b, c = (build_prompt(r, 2048, {}) for r in (first, search, second))
    assert (len(a), len(b), len(c)) == (40, 16, 70)
    assert a[:32] == c[:32]
    assert a[:16] == b


def test_sessions_of_agents_become_programs_with_helpers_and_joins(tmp_path: Path) -> None:
    path = write(tmp_path, "w.jsonl", WEKA)
    trace = read_trace(path, rate=2.0)
    assert [r.waits_for for r in trace.requests] == [(), (0,), (1,), (0,), (0, 2, 3), (4,), ()]
    assert [r.kind for r in trace.requests[:4]] == ["agent", "helper", "helper", "helper"]
    assert [r.program for r in trace.requests] == [0] * 6 + [1]
    # Pauses: 3 - 2, 6 - 4, 3.5 - 2, 12 - max(2, 7, 10), and the think time that is stated.
    assert [r.arrival for r in trace.requests[1:6]] == [1, 2, 1.5, 2, 0.25]
    assert (trace.requests[0].arrival, trace.is_trace) == (0, False)
    assert trace.requests[5].output_tokens == 1
    one, other = (build_prompt(trace.requests[i], 2048, {}) for i in (0, 6))
    assert one[:64] != other  # ids are of one session
    text = WEKA.replace('"local"', '"global"').replace(
        '"s2", ', '"s2", "hash_id_scope": "global", '
    )
    shared = read_trace(write(tmp_path, "g.jsonl", text), rate=2.0).requests
    one, other = (build_prompt(shared[i], 2048, {}) for i in (0, 6))
    assert one[:64] == other


def test_a_list_of_lengths_gets_arrivals_at_random_and_asks_for_their_rate(tmp_path: Path) -> None:
    path = write(tmp_path, "s.csv", LENGTHS)
    requests = read_trace(path, rate=4.0).requests
    assert [(r.num_prompt_tokens, r.output_tokens) for r in requests] == [(100, 20), (7, 300)]
    assert requests[0].arrival == 0 < requests[1].arrival
    assert read_trace(path, 1, rate=4.0).requests[1].arrival != requests[1].arrival
    long = LENGTHS + "2,10,10,20,1.0\n" * 2000
    last = read_trace(write(tmp_path, "l.csv", long), rate=4.0).requests[-1]
    assert last.arrival == pytest.approx(500, rel=0.1)
    with pytest.raises(ConfigError, match=r"does not say when requests come: give .*--rate"):
        read_trace(path)
    with pytest.raises(ConfigError, match="--rate is for files that do not"):
        read_trace(write(tmp_path, "a.csv", AZURE), rate=4.0)
    timed = "arrived_at,num_prefill_tokens,num_decode_tokens\n3.5,10,2\n4.0,11,3\n"
    assert [r.arrival for r in read_trace(write(tmp_path, "t.csv", timed)).requests] == [0, 0.5]


def test_a_trace_of_agents_is_compared_as_programs(tmp_path: Path) -> None:
    path = str(write(tmp_path, "w.jsonl", WEKA))
    data = tmp_path / "out.json"
    words = ["compare", "fcfs", "--workload", path, "--rate", "0.5", "--slo", "agent:program=60"]
    assert main([*words, "--seeds", "1", "--json", str(data)]) == 0
    document = json.loads(data.read_bytes())
    assert document["workload"]["programs"] == 2
    assert document["results"][0]["totals"]["programs_in_time"] == 1
    assert document["results"][0]["durations"]["slowdown"]["max"] == pytest.approx(1, abs=0.01)


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
        ("b.csv", BURSTGPT.replace("472", "-472"), ":2", "below 0"),
        ("b.csv", BURSTGPT.replace("45,", "soon,"), ":3", "Timestamp"),
        ("b.csv", BURSTGPT + "130,GPT-4\n", ":6", "expected 6 columns, got 2"),
        ("q.jsonl", BAILIAN.replace('"chat_id": 5', '"chat_id": 4'), ":2", "4 is there twice"),
        ("q.jsonl", BAILIAN.replace("[1]", "[1, 2]"), ":3", "16 tokens are 1 blocks of 16"),
        ("q.jsonl", BAILIAN.replace('"type": "search", ', ""), ":3", "type"),
        ("w.jsonl", WEKA.replace('"in": 130', '"in": 0'), ":1: call 1", "at least 1 token in"),
        ("w.jsonl", WEKA.replace("[9, 10]", "[9, 10, 11]"), ":1: call 3", "are 2 blocks of 64"),
        ("w.jsonl", WEKA.replace('"id": "s2", ', ""), ":2", "id"),
        ("s.csv", LENGTHS.replace("300", "0"), ":3", "num_decode_tokens"),
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


def test_outcomes_are_read_for_what_came_and_not_for_what_became_of_it(tmp_path: Path) -> None:
    path = tmp_path / "o.csv"
    path.write_text(
        "arrival_s,client,prompt_tokens,output_tokens,ttft_s,latency_s\n"
        "2.5,b,9,4,1,2\n2.0,a,7,3,1,2\n"
    )
    trace = read_trace(path)
    assert [(r.arrival, r.user, r.num_prompt_tokens, r.output_tokens) for r in trace.requests] == [
        (0.0, "a", 7, 3),
        (0.5, "b", 9, 4),
    ]
