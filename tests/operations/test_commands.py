"""Commands as plain data: each crosses to the process of the engine, and its answer comes back."""

import pytest

from aioserve.engine.operations import (
    OPERATOR_COMMANDS,
    AbortElsewhere,
    EngineCommand,
    FindReport,
    HealthCheck,
    LoadAdapter,
    Pause,
    Reload,
    ResetPrefixCache,
    Resume,
    SetLogLevel,
    ShowMetrics,
    ShowSteps,
    Sleep,
    SwitchPolicy,
    SwitchShadow,
    TryPolicy,
    UnloadAdapter,
    Wake,
)
from aioserve.engine.operations.command import Counted, Health, Report, commands_of
from aioserve.engine.operations.commands import PolicyName
from aioserve.fleet.workers.messages import TO_HOST, decoder, encoder

#: A command of each kind, and an answer to it.
ANSWERED = [
    (AbortElsewhere("id", "ann"), True),
    (FindReport("id"), None),
    (HealthCheck(), Health("failing", "it raised")),
    (LoadAdapter("sql", "/a"), None),
    (Reload("/weights", "abort"), None),
    (ResetPrefixCache(), True),
    (SetLogLevel("debug"), None),
    (ShowMetrics([Counted("n", "doc", ("a",), [(("x",), 3)])]), b"text"),
    (ShowSteps(3), None),
    (SwitchPolicy("fcfs", {"a": [1]}), PolicyName("priority", {})),
    (SwitchShadow(None), None),
    (TryPolicy("fcfs", None, 1.5, 20), Report("id", 20, 0, ["a"], True, "table")),
    (UnloadAdapter("sql"), None),
    *((kind(), None) for kind in (Pause, Resume, Sleep, Wake)),
]


@pytest.mark.parametrize(("command", "answer"), ANSWERED, ids=lambda x: type(x).__name__)
def test_a_command_and_its_answer_cross_as_they_are(command, answer):
    assert decoder(TO_HOST).decode(encoder.encode(command)) == command
    if answer is not None:
        assert decoder(command.answer_type).decode(encoder.encode(answer)) == answer


def test_no_two_commands_have_a_route_or_a_name_together():
    assert len({command.http.path for command in OPERATOR_COMMANDS}) == len(OPERATOR_COMMANDS)
    names = [command.__name__ for command in commands_of(EngineCommand)]
    assert len(set(names)) == len(names)


def test_every_command_of_an_engine_can_be_run():
    for command in commands_of(EngineCommand):
        assert command.run_on is not EngineCommand.run_on, command


def test_every_command_says_what_it_does():
    for command in OPERATOR_COMMANDS:
        assert command.__doc__
        assert command.__doc__.strip()[-1] in ".)", command
