"""Traffic as people have it is read as it came; a bad file is refused by file, line and words."""

import json
from pathlib import Path

import pytest

from aioserve.cli.main import main
from aioserve.config import ModelConfig
from aioserve.errors import ConfigError
from aioserve.lab.workloads.synthetic import WorkloadSource
from aioserve.lab.workloads.traces import read_trace
from aioserve.lab.workloads.workload import Reading, WorkloadRequest, build_prompt
from aioserve.model_source.info import ModelInfo

SAMPLES = Path(__file__).parent / "traces"
PER_FOUR = Reading(tokenizer="4")
CSV_COLUMNS = (
    "arrival=time,prompt=in_tokens,output=out_tokens,user=customer,class=route,priority=urgent"
)
JSON_COLUMNS = "arrival_ms=at,prompt=usage.in,output=usage.out,user=body.user"


def reading_of(name: str) -> Reading:
    """Samples of texts need a way to count tokens, others state them."""
    return PER_FOUR if name in ("sharegpt.json", "vllm_custom.jsonl") else Reading()


def read(name: str, columns: str = "", rate: float | None = None) -> tuple[WorkloadRequest, ...]:
    reading = Reading(columns=Reading.parse_columns(columns)) if columns else reading_of(name)
    return read_trace(SAMPLES / name, 0, rate, reading).requests


def test_a_chat_of_sharegpt_is_its_first_question_and_the_length_of_its_answer() -> None:
    requests = read("sharegpt.json", rate=2.0)
    # The question has 20 characters, its answer 26; the "Welcome!" of an assistant is no reply.
    assert [(r.num_prompt_tokens, r.output_tokens) for r in requests] == [(5, 7), (5, 1)]
    assert requests[0].arrival == 0 < requests[1].arrival
    assert {r.follows for r in requests} == {-1}


def test_with_think_all_turns_of_a_chat_come_and_hold_what_was_said() -> None:
    reading = Reading(tokenizer="4", think=6.0)
    first, second, other = read_trace(SAMPLES / "sharegpt.json", 0, 2.0, reading).requests
    assert (second.follows, second.arrival, second.output_tokens) == (0, 6.0, 3)
    assert second.num_prompt_tokens == 5 + 7 + 4
    assert (first.session, second.session, other.session) == (0, 0, 1)
    reply = [3, 1, 4, 1, 5, 9, 2]
    begin = build_prompt(first, 2048, {})
    assert build_prompt(second, 2048, {0: reply})[:12] == [*begin, *reply]


def test_texts_are_counted_with_the_tokenizer_of_a_model() -> None:
    tokenizer = ModelInfo(ModelConfig(model="embedded")).tokenizer
    trace = read_trace(SAMPLES / "vllm_custom.jsonl", 0, 1.0, Reading(tokenizer="embedded"))
    lines = [json.loads(line) for line in (SAMPLES / "vllm_custom.jsonl").read_text().splitlines()]
    assert [r.num_prompt_tokens for r in trace.requests] == [
        len(tokenizer(line["prompt"])["input_ids"]) for line in lines
    ]
    assert [r.output_tokens for r in trace.requests] == [10, 1520]


def test_a_result_of_vllms_benchmark_is_the_requests_that_it_answered() -> None:
    requests = read("vllm_result.json")
    assert [(r.arrival, r.num_prompt_tokens, r.output_tokens) for r in requests] == [
        (0.0, 100, 20),
        (0.5, 40, 40),
    ]


def test_answers_of_an_api_are_requests_by_model_with_the_tokens_that_were_billed() -> None:
    requests = read("openai_answers.jsonl")
    assert [(r.arrival, r.num_prompt_tokens, r.output_tokens, r.kind) for r in requests] == [
        (0.0, 30, 12, "small"),
        (2.0, 7, 90, "large"),
        (5.5, 25, 4, "small"),
    ]
    assert requests[2].user == "ann"


def test_anthropics_cached_tokens_are_a_part_of_the_prompt(tmp_path: Path) -> None:
    usage = {"input_tokens": 5, "cache_read_input_tokens": 90, "output_tokens": 3}
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"type": "message", "model": "m", "usage": usage}))
    (request,) = read_trace(path, 0, 1.0).requests
    assert request.num_prompt_tokens == 95


def test_a_table_has_the_columns_that_it_is_said_to_have() -> None:
    bob, ann = read("table.csv", CSV_COLUMNS)  # the row without output tokens has failed
    assert (bob.arrival, ann.arrival) == (0.0, 1.5)
    assert (ann.num_prompt_tokens, ann.output_tokens, ann.user, ann.kind) == (
        374,
        44,
        "ann",
        "chat",
    )
    assert (bob.priority, bob.kind) == (5, "batch")
    first, second = read("table.jsonl", JSON_COLUMNS)
    assert (first.num_prompt_tokens, first.output_tokens, first.user) == (374, 44, "ann")
    assert (second.arrival, second.output_tokens, second.user) == (1.0, 3, "")


def test_a_table_of_texts_without_arrivals_is_counted_and_gets_a_rate(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text('asked,answered\n"Who goes\nthere?",A friend\n')
    columns = Reading.parse_columns("prompt_text=asked,output_text=answered")
    (request,) = read_trace(path, 0, 2.0, Reading(columns=columns, tokenizer="1")).requests
    assert (request.num_prompt_tokens, request.output_tokens) == (15, 8)


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("sharegpt.json", ["--tokenizer", "4", "--think", "2", "--rate", "1"]),
        ("vllm_result.json", []),
        ("vllm_custom.jsonl", ["--tokenizer", "4", "--rate", "1"]),
        ("openai_answers.jsonl", []),
        ("table.csv", ["--columns", CSV_COLUMNS]),
        ("table.jsonl", ["--columns", JSON_COLUMNS]),
    ],
)
def test_compare_runs_on_each_sample(name: str, flags: list[str], tmp_path: Path) -> None:
    data = tmp_path / "out.json"
    words = ["compare", "fcfs", "chunked_prefill", "--workload", str(SAMPLES / name), *flags]
    assert main([*words, "--seeds", "1", "--json", str(data)]) == 0
    document = json.loads(data.read_bytes())
    assert document["workload"]["name"] == name


def broken(name: str, old: str, new: str) -> str:
    text = (SAMPLES / name).read_text()
    assert old in text
    return text.replace(old, new, 1)


@pytest.mark.parametrize(
    ("name", "old", "new", "where", "what"),
    [
        ("sharegpt.json", '"value": "She', '"valeu": "She', ":2: record 1", "`value`"),
        ("sharegpt.json", '"value": "Sum', '"val": "Sum', ":12: record 3", "`value`"),
        ("sharegpt.json", "]}", "]", "", "malformed"),
        ("vllm_result.json", '"input_lens"', '"input"', ":1", "--save-detailed"),
        ("vllm_result.json", "[20, 0, 40]", "[20, 0]", ":1", "output_lens has 2"),
        ("vllm_result.json", "[100,", "[0,", ":1: input_lens[0]", "at least 1, got 0"),
        ("vllm_result.json", "[812.5", "[-1", ":1: start_times[0]", "got -1"),
        ("vllm_custom.jsonl", "1520", '"many"', ":2", "Expected `int`"),
        ("vllm_custom.jsonl", "What is the capital of Iran?", "", ":2", "at least one token"),
        ("openai_answers.jsonl", '"prompt_tokens": 7', '"tokens": 7', ":2", "expected a usage"),
        ("openai_answers.jsonl", '"created": 1767225602, ', "", ":2", "stated for some"),
        ("openai_answers.jsonl", '"usage"', '"use"', ":1", "got a record with choices, created"),
        ("openai_answers.jsonl", "30", "-30", ":1", "at least 1 token in"),
    ],
)
def test_a_bad_record_is_named_by_file_and_line(
    tmp_path: Path, name: str, old: str, new: str, where: str, what: str
) -> None:
    path = tmp_path / name
    path.write_text(broken(name, old, new))
    with pytest.raises(ConfigError) as refusal:
        read_trace(path, 0, None if "openai" in name or "result" in name else 1.0, reading_of(name))
    assert f"{path}{where}" in str(refusal.value)
    assert what in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "columns", "old", "new", "where", "what"),
    [
        ("table.csv", CSV_COLUMNS, "374", "many", ":2: in_tokens", "a whole number, got 'many'"),
        ("table.csv", CSV_COLUMNS, ";374", ";0", ":2: in_tokens", "at least 1, got '0'"),
        ("table.csv", CSV_COLUMNS, "2026-01-31 12:00:00.000", "noon", ":3: time", "got 'noon'"),
        ("table.csv", CSV_COLUMNS, "2026-01-31 12:00:00.000", "", ":3: time", "got ''"),
        ("table.csv", CSV_COLUMNS, ";batch;5\n", "\n", ":3", "expected 6 columns, got 4"),
        ("table.csv", CSV_COLUMNS, "customer", "client", ":2", "the column 'customer', as --col"),
        ("table.jsonl", JSON_COLUMNS, '"in": 12', '"in": 1.5', ":2: usage.in", "number, got 1.5"),
        ("table.jsonl", JSON_COLUMNS, "1767225601123", '"soon"', ":2: at", "number, got 'soon'"),
        ("table.jsonl", JSON_COLUMNS, "{}", "{", ":2", "truncated"),
    ],
)
def test_a_bad_cell_is_named_by_its_column_and_what_it_holds(
    tmp_path: Path, name: str, columns: str, old: str, new: str, where: str, what: str
) -> None:
    path = tmp_path / name
    path.write_text(broken(name, old, new))
    with pytest.raises(ConfigError) as refusal:
        read_trace(path, 0, None, Reading(columns=Reading.parse_columns(columns)))
    assert f"{path}{where}" in str(refusal.value)
    assert what in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("arrival=time", "expected either prompt=COLUMN or prompt_text=COLUMN"),
        ("prompt=a,output=b,output_text=c", "expected either output=COLUMN or output_text"),
        ("prompt=a,outputs=b", "'outputs' means nothing (did you mean 'output'?)"),
        ("prompt", "expected NAME=COLUMN,..., got 'prompt'"),
    ],
)
def test_columns_that_cannot_be_are_refused(text: str, what: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        Reading.parse_columns(text)
    assert what in str(refusal.value)


def test_texts_without_a_tokenizer_are_refused_with_both_ways_to_count_them() -> None:
    for name in ("sharegpt.json", "vllm_custom.jsonl"):
        with pytest.raises(ConfigError, match=r"--tokenizer MODEL.*--tokenizer 4"):
            read_trace(SAMPLES / name, 0, 1.0)


@pytest.mark.parametrize(
    ("name", "reading", "words"),
    [
        ("vllm_result.json", PER_FOUR, "states lengths: --tokenizer is for texts"),
        ("openai_answers.jsonl", PER_FOUR, "states lengths: --tokenizer is for texts"),
        ("vllm_custom.jsonl", Reading(tokenizer="4", think=2.0), "which --think is for"),
        ("table.csv", Reading(columns=(("prompt", "x"),), think=2.0), "--think is for chats"),
        ("mooncake.jsonl", Reading(think=2.0), "states lengths: --tokenizer and --think"),
    ],
)
def test_a_flag_without_effect_is_refused(
    name: str, reading: Reading, words: str, tmp_path: Path
) -> None:
    path = SAMPLES / name
    if not path.exists():
        path = tmp_path / name
        path.write_text(
            '{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [1]}\n'
        )
    with pytest.raises(ConfigError, match=words):
        read_trace(path, 0, 2.0, reading)


def test_equal_records_are_told_apart_by_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    chat = '{"conversations": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "I"}]}'
    path.write_text(f'[{chat},\n{chat},\n{{"conversations": 5}}]')
    with pytest.raises(ConfigError, match=r"s\.json:3: record 3"):
        read_trace(path, 0, 2.0, PER_FOUR)


@pytest.mark.parametrize(
    ("row", "words"),
    [("1,5,5,", "at: expected milliseconds"), ("-3,5,5,1", "limit: expected seconds, at least 0")],
)
def test_an_arrival_that_is_missing_and_a_negative_timeout_are_refused(
    row: str, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"limit,in,out,at\n{row}\n")
    columns = Reading.parse_columns("arrival_ms=at,prompt=in,output=out,timeout=limit")
    with pytest.raises(ConfigError, match=words):
        read_trace(path, 0, None, Reading(columns=columns))


def test_a_file_of_two_results_is_one_result_too_many(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text((SAMPLES / "vllm_result.json").read_text() * 2)
    with pytest.raises(ConfigError, match=r"r\.json:2: a second result"):
        read_trace(path)


def test_what_a_table_says_of_itself_is_refused_for_a_description() -> None:
    source = WorkloadSource(path="mixed", reading=PER_FOUR)
    with pytest.raises(ConfigError, match="--tokenizer and --think are for"):
        source.load(0)


def test_dates_of_a_table_may_state_their_time_zone(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("t,i,o\n2026-01-31T12:00:00Z,1,1\n2026-01-31T13:00:01+01:00,1,1\n")
    reading = Reading(columns=Reading.parse_columns("arrival=t,prompt=i,output=o"))
    assert [r.arrival for r in read_trace(path, 0, None, reading).requests] == [0.0, 1.0]
