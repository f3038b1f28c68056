"""A pytest plugin: `pytest --aioserve-policy mypkg.mod:MyScheduler` runs the contract on it.

Loaded in every pytest run where aioserve is installed, so it imports nothing before it is asked.
The tests are those of `aioserve.testing.contract`, added to whatever else is collected.
"""

import importlib.util
import json
import sys
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

import pytest

CONTRACT = str(Path(__file__).with_name("contract.py"))
POLICIES = pytest.StashKey[dict[str, Any]]()  # classes by what they were called


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("aioserve", "contract of scheduler policies")
    group.addoption(
        "--aioserve-policy",
        action="append",
        default=[],
        metavar="POLICY",
        help="run the contract on this policy: an installed name, package.module:Class or "
        "path/to/file.py:Class; may be repeated",
    )
    group.addoption(
        "--aioserve-policy-options",
        type=_mapping,
        default={},
        metavar="JSON",
        help="options of the policies, as a JSON object",
    )
    group.addoption(
        "--aioserve-examples",
        type=int,
        default=None,
        metavar="N",
        help="how many random traffics each policy meets at each pipeline depth",
    )


def pytest_configure(config: pytest.Config) -> None:
    specs: list[str] = config.getoption("--aioserve-policy")
    if not specs:
        return
    if importlib.util.find_spec("hypothesis") is None:
        raise pytest.UsageError("--aioserve-policy needs hypothesis: pip install aioserve[test]")
    config.stash[POLICIES] = _load(specs, str(config.invocation_params.dir))
    if not any(argument in (CONTRACT, "aioserve.testing.contract") for argument in config.args):
        config.args.append(CONTRACT)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Fill in the policies where the contract's own file is collected; others name theirs."""
    if "subject" not in metafunc.fixturenames or metafunc.module.__file__ != CONTRACT:
        return
    from aioserve.testing.contract import Subject
    from aioserve.testing.machine import DEFAULT_EXAMPLES

    options: dict[str, Any] = metafunc.config.getoption("--aioserve-policy-options")
    max_examples = metafunc.config.getoption("--aioserve-examples") or DEFAULT_EXAMPLES
    policies = metafunc.config.stash.get(POLICIES, {})
    subjects = [Subject(policy, options, max_examples) for policy in policies.values()]
    metafunc.parametrize("subject", subjects, ids=list(policies))


def _load(specs: list[str], folder: str) -> dict[str, Any]:
    from aioserve.errors import ConfigError
    from aioserve.scheduler import load_policy

    if folder not in sys.path:
        sys.path.append(folder)  # a module beside which pytest was started need not be installed
    try:
        return {spec: load_policy(spec) for spec in specs}
    except ConfigError as error:
        raise pytest.UsageError(f"--aioserve-policy: {error}") from error


def _mapping(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ArgumentTypeError(f"a JSON object is needed, got {text}")
    return value
