"""What an engine is asked besides requests: every command, declared once, with what follows of it.

A command is a struct: its fields are what is told, its docstring is what the docs say, `run_on`
does it. Messages between processes, routes, the OpenAPI document, the table in docs/operations.md
and the methods of `AsyncClient` are made of that. Loads no engine.
"""

import importlib
from typing import TYPE_CHECKING, Any

from aioserve.engine.operations.command import (
    AbortElsewhere,
    EngineCommand,
    HealthCheck,
    OperatorCommand,
    ShowMetrics,
    ShowSteps,
)

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


def __getattr__(name: str) -> Any:
    """Return what is of operators' commands, which are loaded when the first one is asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("aioserve.engine.operations.commands"), name)
