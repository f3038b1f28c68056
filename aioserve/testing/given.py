"""The contracts that a command line may ask for, each with how its classes are found.

Imports nothing before it is asked: every pytest run loads this.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest


class Contract(NamedTuple):
    """One that the command line may ask for."""

    option: str
    module: str
    load: Callable[[pytest.Config, str], type]  # a class by what it was called; `ConfigError`
    subject: Callable[[pytest.Config, type], Any]  # what the tests get
    given: pytest.StashKey[dict[str, type]]  # the classes, by what they were called

    def kind_of(self, subject: Any) -> type:
        """The class that a subject is about."""
        kind = subject.kind
        assert isinstance(kind, type)
        return kind

    @property
    def path(self) -> str:
        """The file of the tests."""
        return str(Path(__file__).parent.joinpath(*self.module.split(".")[2:])) + ".py"


def _load_policy(config: pytest.Config, spec: str) -> type:
    from aioserve.scheduler import BaseScheduler, load_policy

    policy = load_policy(spec)
    if issubclass(policy, BaseScheduler):
        policy.parse_options(config.getoption("--aioserve-policy-options"))
    return policy


def _policy_subject(config: pytest.Config, policy: type) -> Any:
    from aioserve.testing.contract import Subject
    from aioserve.testing.state_machine import DEFAULT_EXAMPLES

    options: dict[str, Any] = config.getoption("--aioserve-policy-options")
    return Subject(policy, options, config.getoption("--aioserve-examples") or DEFAULT_EXAMPLES)


def _load_format(config: pytest.Config, spec: str) -> type:
    from aioserve.formats import load_format

    return load_format(spec)


def _format_subject(config: pytest.Config, kind: type) -> Any:
    from aioserve.testing.formats.contract import DEFAULT_EXAMPLES, FormatSubject

    return FormatSubject(kind, config.getoption("--aioserve-examples") or DEFAULT_EXAMPLES)


def _load_router(config: pytest.Config, spec: str) -> type:
    from aioserve.routing import load_router

    router = load_router(spec)
    router.parse_options(config.getoption("--aioserve-router-options"))
    return router


def _router_subject(config: pytest.Config, kind: type) -> Any:
    from aioserve.testing.routers.contract import RouterSubject

    return RouterSubject(kind, config.getoption("--aioserve-router-options"))


def _load_autoscaler(config: pytest.Config, spec: str) -> type:
    from aioserve.routing import load_autoscaler

    autoscaler = load_autoscaler(spec)
    autoscaler.parse_options(config.getoption("--aioserve-autoscaler-options"))
    return autoscaler


def _autoscaler_subject(config: pytest.Config, kind: type) -> Any:
    from aioserve.testing.autoscalers.contract import AutoscalerSubject

    return AutoscalerSubject(kind, config.getoption("--aioserve-autoscaler-options"))


POLICY = Contract(
    "--aioserve-policy", "aioserve.testing.contract", _load_policy, _policy_subject,
    pytest.StashKey[dict[str, type]](),
)  # fmt: skip
FORMAT = Contract(
    "--aioserve-format", "aioserve.testing.formats.contract", _load_format, _format_subject,
    pytest.StashKey[dict[str, type]](),
)  # fmt: skip
ROUTER = Contract(
    "--aioserve-router", "aioserve.testing.routers.contract", _load_router, _router_subject,
    pytest.StashKey[dict[str, type]](),
)  # fmt: skip
AUTOSCALER = Contract(
    "--aioserve-autoscaler", "aioserve.testing.autoscalers.contract", _load_autoscaler,
    _autoscaler_subject, pytest.StashKey[dict[str, type]](),
)  # fmt: skip
CONTRACTS = (POLICY, FORMAT, ROUTER, AUTOSCALER)
