"""What an engine is asked besides requests: every command, declared once, with what follows of it.

A command is a struct: its fields are what is told, its docstring is what the docs say, `run_on`
does it. Messages between processes, routes, the OpenAPI document, the table in docs/operations.md
and the methods of `AsyncClient` are made of that. Loads no engine.
"""

from typing import Any

from aioserve.operations.command import EngineCommand, OperatorCommand, commands_of
from aioserve.operations.commands import (
    AbortElsewhere,
    EngineState,
    FindReport,
    HealthCheck,
    LoadAdapter,
    OperatorMethods,
    Pause,
    PolicyName,
    Reload,
    ResetPrefixCache,
    Resume,
    SetLogLevel,
    ShowMetrics,
    ShowSteps,
    Sleep,
    SwitchPolicy,
    SwitchShadow,
    Trial,
    TryPolicy,
    UnloadAdapter,
    Wake,
)

#: Of operators, in the order of the docs.
OPERATOR_COMMANDS: tuple[type[OperatorCommand[Any, Any]], ...] = commands_of(OperatorCommand)

__all__ = [
    "OPERATOR_COMMANDS",
    "AbortElsewhere",
    "EngineCommand",
    "EngineState",
    "FindReport",
    "HealthCheck",
    "LoadAdapter",
    "OperatorCommand",
    "OperatorMethods",
    "Pause",
    "PolicyName",
    "Reload",
    "ResetPrefixCache",
    "Resume",
    "SetLogLevel",
    "ShowMetrics",
    "ShowSteps",
    "Sleep",
    "SwitchPolicy",
    "SwitchShadow",
    "Trial",
    "TryPolicy",
    "UnloadAdapter",
    "Wake",
]
