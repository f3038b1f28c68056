"""What an engine is asked besides requests: every command, declared once, with what follows of it.

A command is a struct: its fields are what is told, its docstring is what the docs say, `run_on`
does it. Messages between processes, routes, the OpenAPI document, the table in docs/operations.md
and the methods of `AsyncClient` are made of that. Loads no engine.
"""

from typing import TYPE_CHECKING

from aioserve.engine.operations.command import (
    AbortElsewhere,
    EngineCommand,
    HealthCheck,
    OperatorCommand,
    ShowMetrics,
    ShowSteps,
)
from aioserve.support import late_names

if TYPE_CHECKING:
    from aioserve.engine.operations.commands import (
        OPERATOR_COMMANDS,
        EngineState,
        FindReport,
        LoadAdapter,
        OperatorMethods,
        Pause,
        PolicyName,
        Reload,
        ResetPrefixCache,
        Resume,
        SetLogLevel,
        Sleep,
        SwitchPolicy,
        SwitchShadow,
        Trial,
        TryPolicy,
        UnloadAdapter,
        Wake,
    )


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

# The operators' commands are loaded when the first one is asked for.
__getattr__ = late_names(__name__, dict.fromkeys(__all__, "commands"))
