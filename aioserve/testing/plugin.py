"""A pytest plugin: `pytest --aioserve-policy mypkg.mod:MyScheduler` runs the contract on it.

Loaded in every pytest run where aioserve is installed, so it imports nothing before it is asked.
`--aioserve-format` does the same for formats of replies, `--aioserve-router` for routers of fleets,
`--aioserve-autoscaler` for autoscalers, `--aioserve-step-times` for step-time sources. The tests
are those of `aioserve.testing.contract`, `.format_contract`, `.router_contract`,
`.autoscaler_contract` and `.step_times`; the first broken rule is told on a screen, wherever the
contract runs.
"""

import importlib.util
import json
import sys
import textwrap
from argparse import ArgumentTypeError
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Contract:
    """One that the command line may ask for."""

    option: str
    module: str
    load: Callable[[pytest.Config, str], type]  # a class by what it was called; `ConfigError`
    #: What the tests get, made of the class and what it was called.
    subject: Callable[[pytest.Config, type, str], Any]
    what: str
    named: str = "a name, package.module:Class or path/to/file.py:Class"
    has_options: bool = True
    #: The classes, by what they were called.
    given: pytest.StashKey[dict[str, type]] = field(default_factory=pytest.StashKey)

    @property
    def path(self) -> str:
        """The path of the file with the contract's tests."""
        return str(Path(__file__).parent.joinpath(*self.module.split(".")[2:])) + ".py"


def _load_policy(config: pytest.Config, spec: str) -> type:
    from aioserve.scheduler import BaseScheduler, load_policy

    policy = load_policy(spec)
    if issubclass(policy, BaseScheduler):
        policy.parse_options(config.getoption("--aioserve-policy-options"))
    return policy


def _policy_subject(config: pytest.Config, policy: type, spec: str) -> Any:
    from aioserve.testing.contract import Subject
    from aioserve.testing.state_machine import DEFAULT_EXAMPLES

    options: dict[str, Any] = config.getoption("--aioserve-policy-options")
    return Subject(policy, options, config.getoption("--aioserve-examples") or DEFAULT_EXAMPLES)


def _load_format(config: pytest.Config, spec: str) -> type:
    from aioserve.features.formats import load_format

    return load_format(spec)


def _format_subject(config: pytest.Config, kind: type, spec: str) -> Any:
    from aioserve.testing.format_contract import DEFAULT_EXAMPLES, FormatSubject

    return FormatSubject(kind, config.getoption("--aioserve-examples") or DEFAULT_EXAMPLES)


def _load_router(config: pytest.Config, spec: str) -> type:
    from aioserve.fleet.routing import load_router

    router = load_router(spec)
    router.parse_options(config.getoption("--aioserve-router-options"))
    return router


def _router_subject(config: pytest.Config, kind: type, spec: str) -> Any:
    from aioserve.testing.router_contract import RouterSubject

    return RouterSubject(kind, config.getoption("--aioserve-router-options"))


def _load_autoscaler(config: pytest.Config, spec: str) -> type:
    from aioserve.fleet.routing import load_autoscaler

    autoscaler = load_autoscaler(spec)
    autoscaler.parse_options(config.getoption("--aioserve-autoscaler-options"))
    return autoscaler


def _autoscaler_subject(config: pytest.Config, kind: type, spec: str) -> Any:
    from aioserve.testing.autoscaler_contract import AutoscalerSubject

    return AutoscalerSubject(kind, config.getoption("--aioserve-autoscaler-options"))


def _load_step_times(config: pytest.Config, spec: str) -> type:
    from aioserve.runner.step_times import make_step_times

    return type(make_step_times(spec, config.getoption("--aioserve-step-times-options")))


def _step_times_subject(config: pytest.Config, kind: type, spec: str) -> Any:
    from aioserve.testing.step_times import StepTimesSubject

    return StepTimesSubject.named(spec, config.getoption("--aioserve-step-times-options"))


POLICY = Contract(
    "--aioserve-policy",
    "aioserve.testing.contract",
    _load_policy,
    _policy_subject,
    "policy",
    "an installed name, package.module:Class or path/to/file.py:Class",
)
CONTRACTS = (
    POLICY,
    Contract(
        "--aioserve-format",
        "aioserve.testing.format_contract",
        _load_format,
        _format_subject,
        "format of replies",
        has_options=False,
    ),
    Contract(
        "--aioserve-router",
        "aioserve.testing.router_contract",
        _load_router,
        _router_subject,
        "router of a fleet",
    ),
    Contract(
        "--aioserve-autoscaler",
        "aioserve.testing.autoscaler_contract",
        _load_autoscaler,
        _autoscaler_subject,
        "autoscaler of a fleet",
    ),
    Contract(
        "--aioserve-step-times",
        "aioserve.testing.step_times",
        _load_step_times,
        _step_times_subject,
        "step-time source",
        "a profile by name or as a .yaml file, a source by name, package.module:Class or "
        "path/to/file.py:Class",
    ),
)


WIDTH = 98
BROKEN = pytest.StashKey[set[type]]()  # classes that have broken a rule


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("aioserve", "contracts: policies, formats, routers, step times")
    for each in CONTRACTS:
        how = f", as {POLICY.option} does for a policy: {each.named}; repeatable"
        if each is POLICY:
            how = (
                f" and stop at the first broken rule (--maxfail=99: go on): {each.named}; "
                "repeatable. Other tests run only if they are named"
            )
        group.addoption(
            each.option,
            action="append",
            default=[],
            metavar="NAME",
            help=f"run the contract on this {each.what}{how}",
        )
        if each.has_options:
            group.addoption(
                f"{each.option}-options",
                type=_mapping,
                default={},
                metavar="JSON",
                help=f"options of what {each.option} names, as a JSON object",
            )
    group.addoption(
        "--aioserve-examples",
        type=int,
        default=None,
        metavar="N",
        help="number of random request sequences per policy and pipeline depth, or of random texts "
        "per rule of a format",
    )


def pytest_configure(config: pytest.Config) -> None:
    asked = [each for each in CONTRACTS if config.getoption(each.option)]
    if not asked:
        return
    for each in asked:
        if importlib.util.find_spec("hypothesis") is None:
            raise pytest.UsageError(f"{each.option} needs hypothesis: pip install hypothesis")
        config.stash[each.given] = _load(config, each)
    config.stash[BROKEN] = set()
    if config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args[:] = []  # what would run without words on the command line is not meant
    for each in asked:
        if not any(argument in (each.path, each.module) for argument in config.args):
            config.args.append(each.path)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Fill in the classes where a contract's own file is collected; others name theirs."""
    if "subject" not in metafunc.fixturenames:
        return
    for each in CONTRACTS:
        if metafunc.module.__file__ == each.path:
            given = metafunc.config.stash.get(each.given, {})
            subjects = [each.subject(metafunc.config, kind, spec) for spec, kind in given.items()]
            metafunc.parametrize("subject", subjects, ids=list(given))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """One broken rule makes many tests fail: those that are left would say the same again."""
    kind = _given_class(item)
    if kind in item.config.stash.get(BROKEN, ()) and not item.config.getoption("maxfail"):
        pytest.skip(f"{kind.__name__} has broken a rule already" if kind else "")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Instead of a traceback through the kit: the rule, and the story that the error carries."""
    report = yield
    error = None if call.excinfo is None else call.excinfo.value
    is_ours = type(error).__module__.startswith("aioserve.")
    if report.failed and is_ours and _is_of_contract(item):
        if (given := _given_class(item)) is not None:
            item.config.stash[BROKEN].add(given)
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
    for spec, policy in config.stash.get(POLICY.given, {}).items():
        from aioserve.testing.cost import SLOWEST

        if (call := SLOWEST.get(policy)) is not None:
            terminalreporter.write_line(
                f"{spec}: its slowest schedule() took {1000 * call.seconds:.1f} ms here, with "
                f"{call.num_running} requests running and {call.num_waiting} waiting"
            )
    if config.stash.get(BROKEN, ()) and not config.getoption("maxfail"):
        more = "all: check --all, pytest --maxfail=99"
        terminalreporter.write_sep("=", f"the first broken rule ends it; {more}")


def _is_of_contract(item: pytest.Item) -> bool:
    kind, modules = getattr(item, "cls", None), {each.module for each in CONTRACTS}
    return kind is not None and any(base.__module__ in modules for base in kind.__mro__)


def _given_class(item: pytest.Item) -> type | None:
    """Return the class of the command line that the test is for."""
    for each in CONTRACTS:
        is_given = each.given in item.config.stash and str(item.path) == each.path
        if is_given and isinstance(item, pytest.Function):
            subject: Any = item.callspec.params["subject"]
            kind: type = subject.kind
            return kind
    return None


def _wrapped(line: str) -> str:
    return textwrap.fill(line, WIDTH, subsequent_indent="    ", break_long_words=False)


def _load(config: pytest.Config, contract: Contract) -> dict[str, type]:
    from aioserve.errors import ConfigError

    folder = str(config.invocation_params.dir)
    if folder not in sys.path:
        sys.path.append(folder)  # a module beside which pytest was started need not be installed
    specs: list[str] = config.getoption(contract.option)
    try:
        return {spec: contract.load(config, spec) for spec in specs}
    except ConfigError as error:
        raise pytest.UsageError(f"{contract.option}: {error}") from error


def _mapping(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ArgumentTypeError(f"a JSON object is needed, got {text}")
    return value
