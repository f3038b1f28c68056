"""Codex and Claude Code, as npm has them: sessions of two tool calls each, gone on with later."""

import json
import os
import subprocess
from pathlib import Path

import pytest

AGENTS = Path(__file__).parents[2] / ".venv" / "agents" / "node_modules"
CODEX = "@openai/codex/bin/codex.js"
CLAUDE_CODE = "@anthropic-ai/claude-code/cli-wrapper.cjs"  # npm runs no script that links another
WORDS = "The secret word is plover."


def command_of(name):
    """The agent's command, which npm installs. Skips where it is not there."""
    if not (AGENTS / name).exists():
        pytest.skip(f"{name} is not installed: make test-clients does it where there is npm")
    return "node", str(AGENTS / name)


def codex_settings(url):
    """The settings of Codex for the server at `url`, as the benchmark of agents has them."""
    path = Path(__file__).parents[2] / "benchmarks" / "codex.toml"
    return path.read_text().format(model="embedded", url=url)


def run(command, folder, **environment):
    """What it prints. Nothing of this machine's settings reaches it."""
    environment |= {"PATH": os.environ["PATH"], "HOME": str(folder / "home")}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def call(name, **arguments):
    told = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{told}\n</tool_call>"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "note.txt").write_text(WORDS + "\n")
    return tmp_path


@pytest.fixture
def ask_codex(scripted_for_agents, folder):
    """Ask Codex in that folder; the last word is the prompt."""
    codex, (url, _) = command_of(CODEX), scripted_for_agents
    reasoning = 'model_reasoning_effort = "high"\n'
    (folder / "home" / "config.toml").write_text(reasoning + codex_settings(url))

    def ask(*words):
        free = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
        command = [*codex, "exec", *words[:-1], *free, words[-1]]
        return run(command, folder, CODEX_HOME=str(folder / "home"), LOCAL_KEY="none")

    return ask


def test_codex_reads_a_file_by_its_shell_and_goes_on(scripted_for_agents, ask_codex):
    _, say = scripted_for_agents
    say(
        "I look.\n" + call("exec_command", cmd="cat note.txt"),
        call("exec_command", cmd="wc -c note.txt"),
        f"Found: {WORDS}",
    )
    told = ask_codex("What is the secret word in note.txt?")
    assert "27 note.txt" in told
    assert f"Found: {WORDS}" in told
    say("As I said, plover.")
    assert "As I said, plover." in ask_codex("resume", "--last", "Which word was it?")


def test_codex_writes_a_file_by_its_custom_tool(scripted_for_agents, ask_codex, folder):
    _, say = scripted_for_agents
    patch = "*** Begin Patch\n*** Add File: new.txt\n+plover flies\n*** End Patch\n"
    say(call("apply_patch", input=patch), call("exec_command", cmd="cat new.txt"), "Written.")
    assert "Written." in ask_codex("-m", "gpt-5.5", "Write new.txt")
    assert (folder / "new.txt").read_text() == "plover flies\n"


def test_claude_code_reads_a_file_by_its_tools_and_goes_on(scripted_for_agents, folder):
    claude, (url, say) = command_of(CLAUDE_CODE), scripted_for_agents

    def ask(*words, **environment):
        told = run(
            [
                *(*claude, "-p", *words, "--model", "embedded", "--allowedTools", "Read Bash"),
                *("--output-format", "stream-json", "--verbose"),
            ],
            folder,
            ANTHROPIC_BASE_URL=url,
            ANTHROPIC_API_KEY="none",
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
            **environment,
        )
        return [json.loads(line) for line in told.splitlines() if line.startswith("{")]

    say(
        "I read.\n" + call("Read", file_path=str(folder / "note.txt")),
        call("Bash", command="wc -c note.txt", description="Count"),
        f"Found: {WORDS}",
    )
    told = ask("What is the secret word in note.txt?", MAX_THINKING_TOKENS="2048")
    results = [
        block["content"]
        for line in told
        if line["type"] == "user"
        for block in line["message"]["content"]
        if block["type"] == "tool_result"
    ]
    assert WORDS in results[0]
    assert "27 note.txt" in results[1]
    assert (told[-1]["result"], told[-1]["is_error"]) == (f"Found: {WORDS}", False)
    say("As I said, plover.")
    assert ask("Which word was it?", "--continue")[-1]["result"] == "As I said, plover."
