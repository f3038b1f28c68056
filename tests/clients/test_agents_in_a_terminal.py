"""Codex and Claude Code as people use them, in a terminal: what stands on the screen.

Beside the conversation they ask for its title when they like: a script says one thing to all
requests until it has been seen.
"""

import json
import re

import pytest

# The folder is on the path where the clients are installed, and nowhere else.
terminal = pytest.importorskip("terminal", reason="make test-clients installs it").terminal
agents = pytest.importorskip("test_command_line_agents")

ASKED = "What is the secret word in note.txt?"
ANSWER = "The secret word is plover."


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "note.txt").write_text("The secret word is plover.\n")
    return tmp_path


def test_codex_shows_its_tool_calls_and_the_answer_and_goes_on(scripted_alone, folder):
    codex, (url, say) = agents.command_of(agents.CODEX), scripted_alone
    trusted = f'[projects."{folder}"]\ntrust_level = "trusted"\n'
    (folder / "home" / "config.toml").write_text(
        "check_for_update_on_startup = false\n" + agents.codex_settings(url) + trusted
    )
    say("I look.\n" + agents.call("exec_command", cmd="wc -c note.txt"), slowdown=10)
    home = str(folder / "home")
    command = (*codex, "--dangerously-bypass-approvals-and-sandbox", ASKED)
    with terminal(command, folder, HOME=home, CODEX_HOME=home, LOCAL_KEY="none") as screen:
        told = screen.read_until("27 note.txt")
        assert re.search(r"I look\..*Ran wc -c note\.txt.*27 note\.txt", told, re.DOTALL)
        say(ANSWER)
        screen.read_until(ANSWER)
        say("As I said, plover.")
        screen.type("Which word was it?")
        assert ANSWER in screen.read_until("As I said, plover.")


def test_claude_code_shows_its_tool_calls_and_the_answer_and_goes_on(scripted_alone, folder):
    claude, (url, say) = agents.command_of(agents.CLAUDE_CODE), scripted_alone
    known = {"hasTrustDialogAccepted": True, "hasCompletedProjectOnboarding": True}
    (folder / "home" / ".claude.json").write_text(
        json.dumps(
            {
                "hasCompletedOnboarding": True,
                "theme": "dark",
                "customApiKeyResponses": {"approved": ["none"], "rejected": []},
                "projects": {str(folder): known},
            }
        )
    )
    say("I read.\n" + agents.call("Read", file_path=str(folder / "note.txt")), slowdown=10)
    command = (*claude, "--model", "embedded", "--allowedTools", "Read", "Bash", "--", ASKED)
    with terminal(
        command,
        folder,
        HOME=str(folder / "home"),
        ANTHROPIC_BASE_URL=url,
        ANTHROPIC_API_KEY="none",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        CLAUDE_CODE_DISABLE_TERMINAL_TITLE="1",  # which a scripted model cannot make
    ) as screen:
        told = screen.read_until("Read 1 file")
        assert re.search(r"I read\..*Read 1 file", told, re.DOTALL)
        say(ANSWER)
        screen.read_until(ANSWER)
        say("As I said, plover.")
        screen.type("Which word was it?")
        assert ANSWER in screen.read_until("As I said, plover.")
