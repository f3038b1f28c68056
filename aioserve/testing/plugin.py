"""A pytest plugin: `pytest --aioserve-policy mypkg.mod:MyScheduler` runs the contract on it.

Loaded in every pytest run where aioserve is installed, so it imports nothing before it is asked.
The tests are those of `aioserve.testing.contract`; a policy's first broken rule is told on a
screen, wherever the contract runs.
"""

import importlib.util
import json
import sys
import textwrap
from argparse import ArgumentTypeError
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

CONTRACT = str(Path(__file__).with_name("contract.py"))
CONTRACT_MODULE = "aioserve.testing.contract"
WIDTH = 98
POLICIES = pytest.StashKey[dict[str, Any]]()  # classes by what they were called
BROKEN = pytest.StashKey[set[type]]()  # those that have broken a rule


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("aioserve", "contract of scheduler policies")
    group.addoption(
        "--aioserve-policy",
        action="append",
        default=[],
        metavar="POLICY",
        help="run the contract on this policy and stop at the first broken rule (--maxfail=99: go "
        "on): an installed name, package.module:Class or path/to/file.py:Class; repeatable. Other "
        "tests run only if they are named",
    )
    group.addoption(
        "--aioserve-policy-options",
        type=_mapping,
        default={},
        metavar="JSON",
        help="options of these policies, as a JSON object",
    )
    group.addoption(
        "--aioserve-examples",
        type=int,
        default=None,
        metavar="N",
        help="number of random request sequences per policy and pipeline depth",
    )


def pytest_configure(config: pytest.Config) -> None:
    specs: list[str] = config.getoption("--aioserve-policy")
    if not specs:
        return
    if importlib.util.find_spec("hypothesis") is None:
        raise pytest.UsageError("--aioserve-policy needs hypothesis: pip install aioserve[test]")
    config.stash[POLICIES] = _load(config, specs)
    config.stash[BROKEN] = set()
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args[:] = [CONTRACT]  # what would run without words on the command line is not meant
    elif not any(argument in (CONTRACT, CONTRACT_MODULE) for argument in config.args):
        config.args.append(CONTRACT)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Fill in the policies where the contract's own file is collected; others name theirs."""
    if "subject" not in metafunc.fixturenames or metafunc.module.__file__ != CONTRACT:
        return
    from aioserve.testing.contract import Subject
    from aioserve.testing.state_machine import DEFAULT_EXAMPLES

    options: dict[str, Any] = metafunc.config.getoption("--aioserve-policy-options")
    max_examples = metafunc.config.getoption("--aioserve-examples") or DEFAULT_EXAMPLES
    policies = metafunc.config.stash.get(POLICIES, {})
    subjects = [Subject(policy, options, max_examples) for policy in policies.values()]
    metafunc.parametrize("subject", subjects, ids=list(policies))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """One broken rule makes many tests fail: those that are left would say the same again."""
    policy = _given_policy(item)
    if policy in item.config.stash.get(BROKEN, ()) and not item.config.getoption("maxfail"):
        pytest.skip("the policy has broken a rule already")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Instead of a traceback through the kit: the rule, and the story that the error carries."""
    report = yield
    error = None if call.excinfo is None else call.excinfo.value
    is_ours = type(error).__module__.startswith("aioserve.")
    if report.failed and is_ours and _is_of_contract(item):
        if (policy := _given_policy(item)) is not None:
            item.config.stash[BROKEN].add(policy)
        if item.config.getoption("tbstyle") == "auto":
            notes = getattr(error, "__notes__", [])
            lines = "\n".join([str(error), *notes]).splitlines()
            program = lines.index("To reproduce:") if "To reproduce:" in lines else len(lines)
            told = [_wrapped(line) for line in lines[:program]]
            report.longrepr = "\n".join(told + lines[program:])
    return report


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for spec, policy in config.stash.get(POLICIES, {}).items():
        from aioserve.testing.cost import SLOWEST

        if (call := SLOWEST.get(policy)) is not None:
            terminalreporter.write_line(
                f"{spec}: its slowest schedule() took {1000 * call.seconds:.1f} ms here, with "
                f"{call.num_running} requests running and {call.num_waiting} waiting"
            )
    if config.stash.get(BROKEN, ()) and not config.getoption("maxfail"):
        terminalreporter.write_sep("=", "tests end with the first broken rule (--maxfail=99: all)")


def _is_of_contract(item: pytest.Item) -> bool:
    kind = getattr(item, "cls", None)
    return kind is not None and any(base.__module__ == CONTRACT_MODULE for base in kind.__mro__)


def _given_policy(item: pytest.Item) -> type | None:
    """The policy of the command line that the test is for."""
    is_given = POLICIES in item.config.stash and str(item.path) == CONTRACT
    if not is_given or not isinstance(item, pytest.Function):
        return None
    from aioserve.testing.contract import Subject

    subject = item.callspec.params["subject"]
    assert isinstance(subject, Subject)
    return subject.policy


def _wrapped(line: str) -> str:
    return textwrap.fill(line, WIDTH, subsequent_indent="    ", break_long_words=False)


def _load(config: pytest.Config, specs: list[str]) -> dict[str, Any]:
    from aioserve.errors import ConfigError
    from aioserve.scheduler import BaseScheduler, load_policy

    folder = str(config.invocation_params.dir)
    if folder not in sys.path:
        sys.path.append(folder)  # a module beside which pytest was started need not be installed
    try:
        policies = {spec: load_policy(spec) for spec in specs}
        for policy in policies.values():
            if issubclass(policy, BaseScheduler):
                policy.parse_options(config.getoption("--aioserve-policy-options"))
        return dict(policies)
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
