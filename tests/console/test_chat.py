"""A conversation in a real terminal, and through a pipe, with a real server."""

import asyncio
import io
import os
import re
import shutil
import socket
import subprocess
import sys
import termios
import urllib.request
from asyncio.subprocess import PIPE
from collections.abc import Iterator
from contextlib import AbstractContextManager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest

from aioserve import AsyncEngine
from aioserve.cli.chat import CONTROL
from aioserve.cli.main import main
from aioserve.cli.serve import build_parser
from aioserve.config import EngineConfig, RunnerConfig
from aioserve.model_source.downloads import DOWNLOADS
from aioserve.server.app import listening
from aioserve.server.loading import answering_while_loading
from aioserve.server.sockets import bind, url_of
from tests import processes
from tests.console.terminal import Terminal, at_terminal
from tests.processes import PATIENCE, serving, until

SIMULATED = ("--runner", "simulated", "--step-base-ms", "1", "--enable-admin")
EMBEDDED = Path(__file__).parents[2] / "aioserve/model_source/embedded"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(*SIMULATED, is_shared=True) as (_, url):
        yield url


class Said(NamedTuple):
    """What is told by a chat that has no terminal."""

    returncode: int
    stdout: str
    stderr: str


def talk(url: str, text: str, *argv: str) -> Said:
    """What is told for `text`: by the command in this process, which has imported all of it."""
    told, noted = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "stdin", io.StringIO(text)),
        redirect_stdout(told),
        redirect_stderr(noted),
    ):
        returncode = main(["chat", url, *argv])
    return Said(returncode, told.getvalue(), noted.getvalue())


def chatting(
    *argv: str, state: Path | None = None, columns: int = 200
) -> AbstractContextManager[tuple[Terminal, "subprocess.Popen[str]"]]:
    """`state` is where what is typed is kept; None: it is kept nowhere."""
    command = [sys.executable, "-m", "aioserve", "chat", *argv]
    if state is None:
        return at_terminal(*command, "--no-history", columns=columns)
    environment = {"XDG_STATE_HOME": str(state)}
    return at_terminal(*command, environment=environment, columns=columns)


def num_running(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=PATIENCE) as response:
        text = response.read().decode()
    return float(re.search(r"^aioserve_num_requests_running(?:{.*})? (.*)$", text, re.M)[1])


def test_a_conversation_in_a_terminal(url: str) -> None:
    with chatting(url) as (terminal, process):
        terminal.wait(r"embedded at http.*Ctrl-D leaves\]\r\n> ")
        terminal.type("/set max_tokens=7 ignore_eos=true\n")
        terminal.wait(r"\[max_tokens=7 ignore_eos=True\]\r\n> ")
        terminal.type("Hello\n")
        reply = terminal.wait(r"\[ended by: length\]\r\n> ")
        assert len(reply) > len("Hello\r\n[ended by: length]\r\n> ") + 7
        terminal.type("/stats\n")
        assert "7 output; TTFT " in terminal.wait(r"last reply: .* s\]\r\n> ")
        terminal.type("/policy hrrn\n")
        terminal.wait(r"\[policy hrrn from the next step on; before: chunked_prefill\]\r\n> ")
        terminal.type("/policy fcsf\n")
        terminal.wait(r"unknown policy 'fcsf'.*\]\r\n> ")
        terminal.type("/quit\n")
        assert process.wait(timeout=PATIENCE) == 0


def test_ctrl_c_stops_a_reply_and_the_second_one_leaves(url: str) -> None:
    with chatting(url, "--sampling", "max_tokens=4000", "--sampling", "ignore_eos=1") as (
        terminal,
        process,
    ):
        terminal.wait("> ")
        terminal.type("Hello\n")
        until(lambda: num_running(url) == 1, "the reply has begun")
        terminal.wait(r"Hello\r\n[^\r]+")
        terminal.type("typed early, and gone with the reply")
        terminal.type("\x03")
        terminal.wait(r"\[Ctrl-C again leaves\]\r\n> ")
        until(lambda: num_running(url) == 0, "the server has stopped it as well")
        terminal.type("/stats\n")  # what was said stays, and the count begins anew
        terminal.wait(r"last reply: .*\]\r\n> ")
        terminal.type("half a word")
        terminal.wait("half a word")
        terminal.type("\x03")
        terminal.wait(r"\[Ctrl-C again leaves\]\r\n> ")
        terminal.type("\x03")
        assert process.wait(timeout=PATIENCE) == 0


def test_a_ctrl_c_right_after_the_prompt_is_heard(url: str) -> None:
    """readline looks for signals after its wait for a key alone: many come just before it."""
    with chatting(url) as (terminal, process):
        terminal.wait("> ")
        for _ in range(50):
            terminal.type("\x03")
            terminal.wait(r"\[Ctrl-C again leaves\]\r\n> ")
            terminal.type("/set\n")  # so that the next one is a first one again
            terminal.wait(r"nothing is set: .*\]\r\n> ")
        terminal.type("\x04")
        assert process.wait(timeout=PATIENCE) == 0


def test_a_ctrl_d_typed_while_a_reply_streams_leaves_after_it(url: str) -> None:
    with chatting(url, "--sampling", "max_tokens=400", "--sampling", "ignore_eos=1") as (
        terminal,
        process,
    ):
        terminal.wait("> ")
        terminal.type("Hello\n")
        terminal.wait(r"Hello\r\n[^\r]+")
        terminal.type("\x04")
        terminal.wait(r"\[ended by: length\]")
        assert process.wait(timeout=PATIENCE) == 0


def test_the_terminal_is_left_as_it_was_found(url: str) -> None:
    with chatting(url) as (terminal, process):
        before = terminal.modes()
        terminal.wait("> ")
        assert terminal.modes() != before
        # else a Ctrl-C takes a key away of which readline was told, and for which it waits then
        assert terminal.modes()[3] & termios.NOFLSH
        terminal.type("/quit\n")
        assert process.wait(timeout=PATIENCE) == 0
        assert terminal.modes() == before


def test_tab_completes_commands_and_their_words(url: str) -> None:
    with chatting(url) as (terminal, process):
        terminal.wait("> ")
        terminal.type("/he\t\n")
        terminal.wait(r"Two slashes")
        terminal.type("/policy pre\t\n")
        terminal.wait(r"policy prefix_aged from the next step on")
        terminal.type("/set temp\t0.25\n")
        terminal.wait(r"temperature=0\.25\]")
        terminal.type("\x04")
        assert process.wait(timeout=PATIENCE) == 0


def test_a_pipe_gets_replies_alone_and_the_rest_is_on_stderr(url: str) -> None:
    command = [sys.executable, "-m", "aioserve", "chat", url, "--sampling", "max_tokens=3"]
    result = processes.run(*command, input="Hello\n/stats\nAgain\n")
    assert result.returncode == 0, result.stderr
    assert "/stats" not in result.stdout
    assert "> " not in result.stdout
    assert result.stdout.count("\n") >= 2
    assert "last reply: " in result.stderr


def test_the_first_failure_ends_a_pipe_with_exit_code_1(url: str) -> None:
    result = talk(url, "/polcy fcfs\nHello\n")
    assert (result.returncode, result.stdout) == (1, "")
    message = "aioserve: error: unknown command /polcy (did you mean policy?); /help lists all\n"
    assert result.stderr == message


def test_where_none_listens_the_line_that_starts_a_server_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["chat", "http://127.0.0.1:1"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("aioserve: error: no server listens at http://127.0.0.1:1. Start one ")
    assert "in another terminal: python -m aioserve --port 1, or" in error
    assert error.count("\n") == 1
    told = re.findall(r"python -m aioserve( .*?)?(?=,| &&|\n)", error)
    assert told == [" --port 1", " fetch smollm2", " --port 1 --model smollm2"]
    for words in (told[0], told[2]):
        build_parser().parse_args(words.split())
    assert "smollm2" in DOWNLOADS


@pytest.mark.slow
def _listens(path: Path) -> bool:
    """Return whether the socket takes connections, which its path is there before."""
    with socket.socket(socket.AF_UNIX) as sock:
        return sock.connect_ex(str(path)) == 0


def test_a_server_on_a_unix_socket_is_talked_to(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    command = [sys.executable, "-m", "aioserve", *SIMULATED, "--uds", str(path)]
    with processes.started(*command):
        until(lambda: _listens(path), "the socket")
        result = talk(f"unix:{path}", "Hello\n", "--sampling", "max_tokens=5")
        assert (result.returncode, result.stdout.endswith("\n")) == (0, True), result.stderr


def test_what_was_typed_comes_back_in_the_next_session_from_a_private_file(
    url: str, tmp_path: Path
) -> None:
    path = tmp_path / "aioserve" / "chat_history"
    for typed in ("/set max_tokens=3", "/system Be brief."):
        with chatting(url, state=tmp_path) as (terminal, process):
            terminal.wait("> ")
            terminal.type(f"{typed}\n")
            terminal.wait(r"\]\r\n> ")
            terminal.type("/quit\n")
            assert process.wait(timeout=PATIENCE) == 0
    assert path.read_text().splitlines() == [
        *("/set max_tokens=3", "/quit"),
        *("/system Be brief.", "/quit"),
    ]
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    with chatting(url, state=tmp_path) as (terminal, process):
        terminal.wait("> ")
        terminal.type("\x10" * 4 + "\n")  # Ctrl-P, as the arrow up
        terminal.wait(r"\[max_tokens=3\]\r\n> ")
    with chatting(url) as (terminal, process):  # with --no-history
        terminal.wait("> ")
        terminal.type("\x10" * 4 + "/stats\n")
        terminal.wait(r"\[no reply yet\]\r\n> ")


def test_a_history_that_cannot_be_read_or_kept_is_a_note(url: str, tmp_path: Path) -> None:
    (tmp_path / "aioserve").write_text("no folder")
    with chatting(url, state=tmp_path) as (terminal, process):
        terminal.wait(r"\[earlier lines cannot be read from .*chat_history.*\]\r\n")
        terminal.type("/help\n/quit\n")
        terminal.wait(r"\[what was typed cannot be kept in .*chat_history: .*\]\r\n")
        assert process.wait(timeout=PATIENCE) == 0


def test_lines_of_a_reply_break_between_words(url: str) -> None:
    given = ("seed=1", "max_tokens=120", "ignore_eos=true")
    options = [word for one in given for word in ("--sampling", one)]
    wanted = talk(url, "Hello\n", *options)
    with chatting(url, *options, columns=40) as (terminal, _):
        terminal.wait("leaves\\]\r\n> ")
        terminal.type("Hello\n")
        shown = terminal.wait(r"Hello\r\n[\s\S]*\r\n(?:\[ended by: length\]\r\n)?> ")
    _, _, shown = shown.partition("Hello\r\n")
    lines = shown.removesuffix("> ").replace("[ended by: length]\r\n", "").split("\r\n")
    assert max(map(len, lines)) < 40
    assert len(lines) > 4
    assert " ".join(lines).split() == wanted.stdout.translate(CONTROL).split()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["localhost:8000"], "expected a URL such as http://"),
        (["--sampling", "temprature=1"], "did you mean 'temperature'?"),
        (["--sampling", "temperature=hot"], "--sampling: temperature: "),
        (["--sampling", "temperature=-1"], "temperature must be"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", *argv]) == 2
    assert message in capsys.readouterr().err


def test_what_was_said_goes_with_the_next_message(url: str) -> None:
    """Seen in the tokens of the prompt, as the server counts them."""
    told = ["Hello", "/stats", "Hello", "/stats", "/reset", "Hello", "/stats"]
    told += ["/system Be brief.", "/reset", "Hello", "/stats", ""]
    result = talk(url, "\n".join(told), "--sampling", "max_tokens=3")
    counts = [int(n) for n in re.findall(r"last reply: (\d+) prompt tokens", result.stderr)]
    first, second, anew, with_system = counts
    assert first == anew
    assert second > first + 3
    assert with_system > first


@pytest.mark.slow
async def test_a_server_that_loads_is_waited_for() -> None:
    sockets = bind("127.0.0.1", 0)
    url = url_of(sockets[0])
    command = [sys.executable, "-m", "aioserve", "chat", url, "--sampling", "max_tokens=3"]
    async with answering_while_loading(sockets, shares_port=False):
        chat = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=PIPE)
        assert chat.stderr is not None
        assert await chat.stderr.readline() == b"[the model is being loaded; Ctrl-C leaves]\n"
    config = EngineConfig(runner=RunnerConfig(runner="simulated"))
    async with AsyncEngine(config) as engine, listening(engine, sockets):
        reply, _ = await asyncio.wait_for(chat.communicate(b"Hello\n"), PATIENCE)
    for sock in sockets:
        sock.close()
    assert chat.returncode == 0
    assert reply.strip()


def test_a_server_with_keys_is_given_the_one_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment = {**os.environ, "AIOSERVE_API_KEYS": "sesame-7f3c0a52e9d1"}
    with serving(*SIMULATED[:2], env=environment) as (_, url):
        refused = talk(url, "Hello\n")
        assert (refused.returncode, refused.stdout) == (1, "")
        assert "key" in refused.stderr
        monkeypatch.setenv("AIOSERVE_API_KEY", "sesame-7f3c0a52e9d1")
        result = talk(url, "Hello\n", "--sampling", "max_tokens=3")
        assert result.returncode == 0, result.stderr
        assert result.stdout.strip()


@pytest.mark.slow
def test_a_model_without_a_chat_template_goes_on_with_the_text(tmp_path: Path) -> None:
    model = tmp_path / "plain"
    shutil.copytree(EMBEDDED, model, ignore=shutil.ignore_patterns("chat_template.jinja"))
    with serving("--model", str(model)) as (_, url):
        text = "Hello\n/stats\nHello\n/stats\n"
        result = talk(url, text, "--sampling", "max_tokens=3", "--sampling", "temperature=0")
        assert result.returncode == 0, result.stderr
    assert result.stderr.count("[the model has no chat template: ") == 1
    first, second = re.findall(r"last reply: (\d+) prompt tokens", result.stderr)
    assert int(second) > int(first) + 3


def test_a_reply_cannot_drive_the_terminal() -> None:
    text = "red \x1b[31m bell \x07 \x9b2J delete \x7f, lines\n\tand all else \u00e9 stay"
    shown = text.translate(CONTROL)
    assert shown == "red ^[[31m bell ^G \\x9b2J delete ^?, lines\n\tand all else \u00e9 stay"
