"""A profile is found again in the outcomes of a simulated server that has it."""

import csv
from pathlib import Path

import numpy as np
import pytest

from aioserve.cli.main import main
from aioserve.errors import ConfigError
from aioserve.lab.calibration import write_profile
from aioserve.lab.outcomes import (
    Outcome,
    Session,
    as_workload,
    events,
    fit_outcomes,
    read_outcomes,
)
from aioserve.lab.reproduce.vtc import Target, make_config
from aioserve.lab.simulation.run import simulate
from aioserve.runner.step_times import StepTimeModel, load_profile

TRUE = StepTimeModel(
    base_ms=0.0,
    prefill_token_us=0.0,
    decode_us=0.0,
    context_token_us=1.5,
    idle_ms=11.0,
    prefill_ms=((1.0, 40.0), (1024.0, 260.0), (3072.0, 700.0)),
    decode_ms=((1.0, 30.0), (20.0, 32.0), (60.0, 40.0)),
)


def served(tmp_path: Path, seed: int, factor: float) -> list[Outcome]:
    """What a server with that profile does with requests of mixed lengths, too many to hold."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(0.25, 300))
    asked = [
        Outcome(
            float(arrival),
            str(i % 3),
            int(rng.integers(20, 400)),
            int(rng.integers(40, 300)),
            0.0,
            0.0,
        )
        for i, arrival in enumerate(arrivals)
    ]
    profile = tmp_path / "true.yaml"
    write_profile(TRUE, str(profile))
    target = Target("t", asked, {}, "", Session(factor, 0.0, 0.0), None, None)
    config = make_config(str(profile), target, "fcfs", jitter=0.0, host_factor=factor, seed=0)
    outcome = simulate(config, as_workload(asked, "t"))
    return [
        Outcome(
            o.arrival_s,
            o.client,
            o.prompt_tokens,
            o.output_tokens,
            r.token_times[0] - o.arrival_s,
            r.end - o.arrival_s,
        )
        for o, r in zip(asked, outcome.requests, strict=True)
    ]


def test_a_profile_is_found_again_in_the_outcomes_of_a_server_that_has_it(tmp_path: Path) -> None:
    logs = [served(tmp_path, 1, 1.0), served(tmp_path, 2, 1.05)]
    model, sessions = fit_outcomes(logs, "a test")
    assert sessions[1].host_factor / sessions[0].host_factor == pytest.approx(1.05, abs=0.005)
    assert model.context_token_us == pytest.approx(1.5, rel=0.1)
    for rows, context in ((25, 8000), (35, 9000)):
        first = sessions[0].host_factor
        (found,) = model.seconds_of_decodes(rows, context, 1)
        (true,) = TRUE.seconds_of_decodes(rows, context, 1)
        context_part = 1e-6 * model.context_token_us * context
        assert (found - context_part) * first + context_part == pytest.approx(true, rel=0.02)
    tokens, ms = np.array(model.prefill_ms).T
    true_ms = np.interp(tokens, *np.array(TRUE.prefill_ms).T)
    assert np.median(np.abs(ms / true_ms - 1)) < 0.03
    assert max(session.error for session in sessions) < 0.02


def test_tokens_that_come_together_are_of_one_step() -> None:
    log = [
        Outcome(0.0, "a", 5, 40, 1.0, 3.0),
        Outcome(0.1, "a", 5, 40, 0.901, 2.0),
        Outcome(0.2, "b", 5, 40, 1.9, 2.8001),
    ]
    found = [(event.is_round, event.requests) for event in events(log)]
    assert found == [(True, [0, 1]), (True, [2]), (False, [1]), (False, [0, 2])] or found == [
        (True, [0, 1]),
        (False, [1]),
        (True, [2]),
        (False, [0, 2]),
    ]


def test_a_log_without_full_memory_is_refused_in_words() -> None:
    calm = [Outcome(10.0 * i, "a", 5, 40, 0.1, 2.0) for i in range(20)]
    with pytest.raises(ConfigError, match="too few to tell what a round takes"):
        fit_outcomes([calm], "a test")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("arrival_s,client\n1,2\n", "lacks latency_s,output_tokens,prompt_tokens,ttft_s"),
        ("{columns}\n1,a,5,5,0.5,x\n", ":2: .*latency_s"),
        ("{columns},note\n1,a,5,5,0.5\n", ":2: expected 7 columns, got 5; .* lacks latency_s"),
        ("{columns}\n1,a,5,5,0.5,0.4\n", ":2: the last token came before the first"),
        ("{columns}\n", "has no requests"),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "o.csv"
    path.write_text(text.format(columns=",".join(Outcome.__struct_fields__)))
    with pytest.raises(ConfigError, match=words):
        read_outcomes(path)


def test_a_file_may_quote_its_header_and_lack_what_is_not_used_in_a_row(tmp_path: Path) -> None:
    path = tmp_path / "o.csv"
    with path.open("w", newline="") as file:
        rows = csv.writer(file, quoting=csv.QUOTE_NONNUMERIC)
        rows.writerow([*Outcome.__struct_fields__, "note"])
        rows.writerow([1, "a", 5, 7, 0.5, 1.5, "x"])
        rows.writerow([2, "b", 6, 8, 0.5, 1.5])
    assert [(o.client, o.latency_s) for o in read_outcomes(path)] == [("a", 1.5), ("b", 1.5)]


def test_prompts_are_longer_by_what_the_server_puts_around_them(tmp_path: Path) -> None:
    path = tmp_path / "o.csv"
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(Outcome.__struct_fields__)
        rows.writerow([2, "a", 5, 7, 0.5, 1.5])
        rows.writerow([1, "b", 6, 8, 0.5, 1.5])
    found = read_outcomes(path, extra_prompt_tokens=2)
    assert [(o.client, o.prompt_tokens, o.first, o.end) for o in found] == [
        ("b", 8, 1.5, 2.5),
        ("a", 7, 2.5, 3.5),
    ]


def test_the_command_fits_a_profile_to_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.csv"
    with log.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(Outcome.__struct_fields__)
        for o in served(tmp_path, 1, 1.0):
            rows.writerow([getattr(o, name) for name in Outcome.__struct_fields__])
    profile = tmp_path / "profile.yaml"
    assert main(["calibrate", "--outcomes", str(log), "-o", str(profile)]) == 0
    assert "runner.step_host_factor 1," in capsys.readouterr().out
    assert load_profile(str(profile)).context_token_us == pytest.approx(1.5, rel=0.1)
    with pytest.raises(SystemExit):
        main(["calibrate", "--outcomes"])
    assert main(["calibrate", "--outcomes", str(log), "--quick"]) == 2
