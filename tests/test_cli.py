"""The command as a user runs it: flags, one-line errors, signals, exit codes."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from aioserve.cli import serve
from aioserve.cli.main import main
from aioserve.cli.serve import build_parser, load_config
from aioserve.config import COMMON_SETTINGS, EngineConfig, iter_settings
from aioserve.errors import ConfigError
from aioserve.scheduler import available_policies
from tests import processes
from tests.processes import JSON, PATIENCE, serving, until

SIMULATED = ["--runner", "simulated", "--port", "0"]


def load(*argv: str) -> EngineConfig:
    return load_config(build_parser().parse_args(argv))


def test_a_server_without_a_tokenizer_is_refused(capsys):
    assert main([*SIMULATED, "--skip-tokenizer-init"]) == 2
    assert "a server needs the tokenizer" in capsys.readouterr().err


def test_a_model_can_be_given_several_names():
    assert load("--served-model-name", "a", "b").model.served_names == ("a", "b")
    assert load("--served-model-name", "a").model.served_name == "a"
    assert load().model.served_names == ("embedded",)


def test_without_arguments_every_setting_has_its_default():
    assert load() == EngineConfig()


def shown_settings(capsys, *argv):
    """The settings whose flags stand in a help text, by their names, and the text."""
    with pytest.raises(SystemExit) as caught:
        main([*argv])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    flags = set(re.findall(r"^  (--[\w-]+)", text, re.MULTILINE))
    names = {
        f"--{field.name.replace('_', '-')}": f"{s}.{field.name}" for s, field in iter_settings()
    }
    return {names[flag] for flag in flags & names.keys()}, text


def test_every_setting_has_a_flag_except_mappings(capsys):
    shown, _ = shown_settings(capsys, "--help=all")
    every = {f"{section}.{field.name}" for section, field in iter_settings()}
    assert shown == {name for name in every if not name.endswith("options")}


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_shows_the_thirty_commonest_settings_and_where_the_others_are(flag, capsys):
    every, _ = shown_settings(capsys, "--help=all")
    shown, text = shown_settings(capsys, flag)
    assert len(shown) == 30
    assert shown == set(COMMON_SETTINGS)
    assert text.endswith(f"{len(every) - 30} more settings: aioserve --help=all\n")
    assert "  chunked_prefill  " in text  # the policies


def test_after_a_short_help_every_setting_can_be_parsed_and_shown():
    parser = build_parser()
    before = parser.format_help()
    assert "--send-timeout" not in parser.format_common_help()
    assert parser.format_help() == before
    assert "--send-timeout" in before


def test_flags_win_over_set_and_set_over_the_file(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("server: {port: 1, host: a}\nscheduler: {options: {chunk_size: 1, x: 2}}\n")
    config = load(
        *("--port", "3", "--config", str(path), "--set", "server.port=2"),
        *("--set", "server.host=b", "--set", "scheduler.options.chunk_size=64"),
    )
    assert (config.server.port, config.server.host) == (3, "b")
    assert config.scheduler.options == {"chunk_size": 64, "x": 2}


def test_the_later_of_two_set_wins():
    assert load("--set", "server.port=1", "--set", "server.port=2").server.port == 2


def test_flags_take_the_types_of_their_fields():
    config = load(
        *("--no-enable-prefix-caching", "--watermark", "0.5", "--dtype", "float32"),
        *("--num-kv-blocks", "7", "--policy", "fcfs", "--trust-remote-code"),
        *("--quantization-group-size", "128"),
    )
    assert config.cache.enable_prefix_caching is False
    assert (config.cache.watermark, config.cache.num_kv_blocks) == (0.5, 7)
    assert (config.model.dtype, config.model.trust_remote_code) == ("float32", True)
    assert (config.scheduler.policy, config.model.quantization_group_size) == ("fcfs", 128)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--port", "many"], "error: --port: expected a whole number, got 'many'\n"),
        (["--port", "70000"], "error: --port: expected a whole number of at most 65535, got"),
        (["--set", "server.port=70000"], "error: --set server.port: expected a whole number of at"),
        (["--set", "server.port=1", "--port", "70000"], "error: --port: expected a whole"),
        (["--watermark", "3"], "error: --watermark: expected a number"),
        (["--max-body-mib", "x"], "error: --max-body-mib: expected a whole number or nothing, got"),
        (["--allowed-hosts", "http://x"], "error: --allowed-hosts: expected a text that matches '"),
        (
            ["--set", "server.log_level=loud"],
            "error: --set server.log_level: expected one of debug,",
        ),
        (
            ["--set", "scheduler.options=3"],
            "error: --set scheduler.options: expected a mapping, got",
        ),
        (["--set", "server.prot=1"], "prot"),
        (["--set", "srever.port=1"], "srever"),
        (["--set", "server=1"], "SECTION.NAME=VALUE"),
        (["--set", "server.port"], "SECTION.NAME=VALUE"),
        (["--dtype", "int4"], "--dtype"),
        (["--quantization-group-size", "48"], "invalid choice: '48'"),
        (["--prot", "1"], "--prot"),
        (["dance"], "dance"),
        (["--config", "/does/not/exist.yaml"], "/does/not/exist.yaml"),
    ],
)
def test_a_bad_argument_is_one_line_that_names_it(argv, message, capsys):
    with pytest.raises(SystemExit) as caught:
        sys.exit(main(argv))
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("aioserve: error: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("server: [unclosed", "not valid YAML"),
        ("- a list", "must hold a mapping"),
        ("server: {prot: 1}", "prot"),
        ("server: {port: '80x'}", r"bad\.yaml: server\.port: expected a whole number, got '80x'"),
        ("server: {port: 70000}", r"bad\.yaml: server\.port: expected .* at most 65535, got 70000"),
        ("\x00\x01", "not valid YAML"),
    ],
)
def test_a_bad_file_is_named(tmp_path, text, message):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load("--config", str(path))
    assert str(path) in str(caught.value)


def test_help_lists_every_policy_with_a_line(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    for name in available_policies():
        (line,) = [line for line in lines if line.startswith(f"  {name} ")]
        assert len(line.split()) > 4


# Processes


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--policy", "fairr"], "unknown policy 'fairr' (did you mean 'fair'?)"),
        (["--set", "scheduler.options.chunk=3"], "chunk_size"),
        (["--shadow-policy", "nope"], "unknown policy 'nope'"),
        (["--threads", "2"], "runner.threads is 2, which has no effect"),
    ],
)
def test_what_is_wrong_about_a_policy_is_said_before_the_port_is_taken(argv, message, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["--runner", "simulated", "--port", port, *argv]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "cannot listen" not in error


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return processes.run(sys.executable, "-m", "aioserve", *argv)


def fetch(url: str, body: object = None) -> tuple[int, bytes]:
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, data, JSON), timeout=PATIENCE
        ) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


@pytest.mark.slow  # quick: SIGTERM, in tests/server/test_service_manager.py
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_server_with_exit_code_0(number):
    with serving(*SIMULATED) as (process, url):
        body = {"prompt": "Hello", "max_tokens": 2}
        assert fetch(f"{url}/v1/completions", body)[0] == 200
        process.send_signal(number)
        _, stderr = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0
        assert "Traceback" not in stderr


@pytest.mark.slow
def test_a_signal_before_the_server_is_up_ends_it_as_well(tmp_path):
    # A policy file runs inside start(): it tells us when, and takes its time.
    policy = tmp_path / "slow.py"
    policy.write_text(
        "import os, signal\n"
        "from aioserve.policies.fcfs import FCFSScheduler as Slow\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    result = run("--policy", f"{policy}:Slow", *SIMULATED)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_a_signal_ends_a_server_whose_policy_keeps_raising(tmp_path):
    policy = tmp_path / "failing.py"
    policy.write_text(
        "from policies.fcfs import FCFSScheduler\n"
        "class Failing(FCFSScheduler):\n"
        "    def schedule(self):\n"
        "        if self.num_steps < 5:\n"
        "            return super().schedule()\n"
        "        raise ValueError('no idea')\n"
    )
    with serving(*SIMULATED, "--policy", f"{policy}:Failing") as (process, url):
        for _ in range(2):  # a plain policy has taken its place
            status, _ = fetch(f"{url}/v1/completions", {"prompt": "Hello", "ignore_eos": True})
            assert status == 200
        status, body = fetch(f"{url}/ready")
        assert (status, b"Failing" in body) == (200, True)
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0
        assert 1 <= stderr.count("step_loop: policy Failing failed") <= 2  # not one a step


# A policy file runs in the server's process: it breaks the runner at the hundredth step.
MORTAL = """
from aioserve.policies.fcfs import FCFSScheduler
from aioserve.errors import RunnerDeadError
from aioserve.runner.simulated import SimulatedRunner

compute = SimulatedRunner._compute


def die(runner, step):
    if step.step_id == 100:
        raise RunnerDeadError("the device is gone")
    return compute(runner, step)


class Mortal(FCFSScheduler):
    SimulatedRunner._compute = die
"""


def test_a_dead_engine_tells_its_clients_and_ends_the_process_with_exit_code_3(tmp_path):
    (tmp_path / "mortal.py").write_text(MORTAL)
    policy = f"{tmp_path / 'mortal.py'}:Mortal"
    with serving(*SIMULATED, "--policy", policy) as (process, url):
        with start_stream(url, max_tokens=1000) as response:
            assert b"the device is gone" in response.read()
        _, stderr = process.communicate(timeout=PATIENCE)
        assert process.returncode == 3
        assert stderr.splitlines()[-1].startswith("aioserve: error: the engine has died: ")


@pytest.mark.slow
def test_a_dead_engine_can_be_kept_up_until_a_signal(tmp_path):
    (tmp_path / "mortal.py").write_text(MORTAL)
    policy = f"{tmp_path / 'mortal.py'}:Mortal"
    with serving(*SIMULATED, "--policy", policy, "--no-exit-on-dead-engine") as (process, url):
        with start_stream(url, max_tokens=1000) as response:
            assert b"the device is gone" in response.read()
        status, body = fetch(f"{url}/health")
        assert (status, json.loads(body)["status"]) == (503, "dead")
        assert fetch(f"{url}/v1/completions", {"prompt": "Hello"})[0] == 503
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=PATIENCE) == 3


def test_ctrl_c_before_the_command_runs_is_no_traceback(monkeypatch):
    async def interrupted(config, read_again):
        raise KeyboardInterrupt

    monkeypatch.setattr(serve, "_serve", interrupted)
    assert main(["serve"]) == 0


def start_stream(url: str, max_tokens: int):
    body = {"prompt": "Hello", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), JSON)
    response = urllib.request.urlopen(request, timeout=PATIENCE)
    response.readline()
    return response


def test_a_running_stream_may_finish_while_the_server_drains():
    with serving(*SIMULATED, "--drain-timeout", "300", "--step-base-ms", "1") as (process, url):
        with start_stream(url, max_tokens=400) as response:
            process.send_signal(signal.SIGTERM)
            assert response.read().endswith(b"data: [DONE]\n\n")
        _, stderr = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0
        assert "Traceback" not in stderr


@pytest.mark.slow
@pytest.mark.parametrize("has_second_signal", [False, True])
def test_draining_ends_with_its_time_or_a_second_signal(has_second_signal):
    timeout = "300" if has_second_signal else "0.1"
    with serving(*SIMULATED, "--drain-timeout", timeout, "--step-base-ms", "100") as (process, url):
        with start_stream(url, max_tokens=4000) as response:
            process.send_signal(signal.SIGINT)
            if has_second_signal:
                until(lambda: fetch(f"{url}/ready")[0] == 503, "the server drains")
                process.send_signal(signal.SIGINT)
            assert b'"finish_reason":"abort"' in response.read()
        assert process.wait(timeout=PATIENCE) == 0


def test_configurations_that_cannot_work_are_one_line_and_no_traceback(tmp_path, capsys):
    bad_yaml = tmp_path / "bad.yaml"
    bad_yaml.write_text("server: [unclosed")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        cases = [
            (["--model", "/no/such/model"], "/no/such/model"),
            (["--policy", "fcsf", *SIMULATED], "unknown policy 'fcsf'"),
            (["--set", "scheduler.options.chunk_sise=1", *SIMULATED], "chunk_sise"),
            (["--config", str(bad_yaml)], "bad.yaml"),
            (["--runner", "simulated", "--port", port], f"127.0.0.1:{port}: address already in"),
            (["--runner", "simulated", "--api-workers", "2", "--port", port], "address already in"),
            (["--host", "no.such.host.invalid", *SIMULATED], "no.such.host.invalid"),
            (["--host", "192.0.2.1", *SIMULATED], "192.0.2.1"),
            (["--max-model-len", "10000000"], "max_model_len"),
        ]
        for argv, message in cases:
            assert main(argv) == 2, argv
            check_refusal(capsys.readouterr().err, message)


def test_a_corrupt_model_file_is_one_line_that_names_it(tmp_path, capsys):
    embedded = Path(__file__).parents[1] / "aioserve" / "model_source" / "embedded"
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        folder = shutil.copytree(embedded, tmp_path / name)
        (folder / name).write_bytes(b"\x00 not what it should be")
        assert main(["--model", str(folder), "--port", "0"]) == 2
        check_refusal(capsys.readouterr().err, name.removesuffix(".json"))


def check_refusal(stderr: str, message: str) -> None:
    assert "Traceback" not in stderr, stderr
    last = stderr.splitlines()[-1]
    assert last.startswith("aioserve: error: "), stderr
    assert message in last.lower() or message in last, last


@pytest.mark.slow
def test_an_idle_server_sleeps():
    with serving(*SIMULATED) as (process, url):
        assert fetch(f"{url}/v1/completions", {"prompt": "Hello", "max_tokens": 2})[0] == 200
        until(lambda: is_asleep(process.pid), "two seconds in which the server sleeps")


def is_asleep(pid: int) -> bool:
    """Whether it neither wakes up nor computes in the next two seconds; a few times are nothing."""
    before = wakeups_and_ticks(pid)
    time.sleep(2)
    wakeups, ticks = (now - then for now, then in zip(wakeups_and_ticks(pid), before, strict=True))
    return wakeups < 10 and ticks < 0.1 * os.sysconf("SC_CLK_TCK")


def wakeups_and_ticks(pid: int) -> tuple[int, int]:
    """How often its threads went to sleep, and their CPU time in ticks of the clock."""
    wakeups = ticks = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        status = (thread / "status").read_text()
        wakeups += int(re.search(r"^voluntary_ctxt_switches:\s*(\d+)", status, re.MULTILINE)[1])
        ticks += sum(map(int, (thread / "stat").read_text().rpartition(")")[2].split()[11:13]))
    return wakeups, ticks
