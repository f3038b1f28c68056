"""The command `serve`: a flag for each setting, the log, and the server until a signal ends it.

Knows no setting by name: `config` declares them. Loads neither the server nor torch before the
settings are right.
"""

import argparse
import gc
import logging
import typing
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from aioserve.config import COMMON_SETTINGS, EMBEDDED_MODEL, EngineConfig, iter_settings
from aioserve.errors import ConfigError, SettingError
from aioserve.support import __version__
from aioserve.support.arguments import Parser, TakesArguments, assignment, read_annotation, run
from aioserve.support.logs import set_up_logging
from aioserve.support.process import ignore_sigterm

logger = logging.getLogger(__name__)

_EPILOG = """\
Commands: serve (the default); chat, bench, compare, search, sweep, mispredict, zoo, evaluate,
evolve, check, certify, cards, calibrate, replay, trace, fetch, settings, doctor and completion have
a --help of their own.
Flags override --set, --set overrides --config, and a later --set overrides an earlier one.
Exit codes of serve: 0 after SIGTERM or Ctrl-C, 1 for a failure, 2 for invalid settings, 3 if the
engine died (clients get an error first; --no-exit-on-dead-engine waits for a signal) or if the
process ended itself because the event loop or the shutdown hung.

Policies, for --policy and --shadow-policy:
"""


def run_serve(argv: Sequence[str]) -> int:
    """Serve until a signal ends it; returns the exit code. Raises `ConfigError` for settings that
    cannot work.
    """
    given = build_parser().parse_args(argv)
    config = load_config(given)
    set_up_logging(config.server.log_level, config.server.log_format)
    if config.model.model != EMBEDDED_MODEL:
        from aioserve.model_source.downloads import fetch_if_missing

        fetch_if_missing(config.model.model)  # while Ctrl-C and SIGTERM still end the process
    try:
        run(_serve(config, lambda: load_config(given)))
    finally:
        ignore_sigterm()
    return 0


async def _serve(config: EngineConfig, read_again: Callable[[], EngineConfig]) -> None:
    # Said before the imports that take seconds.
    logger.info(
        "aioserve %s starts: model %s, policy %s",
        __version__,
        config.model.served_name,
        config.scheduler.policy,
    )
    # Nothing of what torch and transformers bring is garbage, and looking for some takes a sixth of
    # their import. Measured: 4.4 s of CPU, or 3.7 without.
    gc.disable()
    try:
        from aioserve.server.app import serve

        if config.server.api_workers:
            from aioserve.fleet.workers.pool import check_platform, workers_listening

            check_platform()
            await serve(config, workers_listening, read_again=read_again)
        else:
            await serve(config, read_again=read_again)  # on again once it serves
    finally:
        gc.enable()


class _ServeParser(Parser):
    """The help of the server: of the commonest settings, or of all."""

    #: The flags of settings.
    settings: Sequence[argparse.Action] = ()

    def format_help(self) -> str:
        """Return all settings, with the installed policies, which are looked up only here."""
        from aioserve.scheduler.descriptions import describe_policies

        policies = describe_policies()
        width = max(map(len, policies), default=0)
        lines = [f"  {name:{width}}  {what}".rstrip() for name, what in policies.items()]
        return super().format_help() + "\n" + _EPILOG + "\n".join([*lines, ""])

    def format_common_help(self) -> str:
        """Return the settings of `COMMON_SETTINGS` alone, and how many there are besides."""
        hidden = [a for a in self.settings if a.dest not in COMMON_SETTINGS]
        helps = [action.help for action in hidden]
        for action in hidden:
            action.help = argparse.SUPPRESS
        try:
            text = self.format_help()
        finally:
            for action, help_text in zip(hidden, helps, strict=True):
                action.help = help_text
        return f"{text}\n{len(hidden)} more settings: aioserve --help=all\n"


class _Help(argparse.Action):
    """`--help`, or `--help=all`: prints it and ends the program."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(parser, _ServeParser)
        print(parser.format_help() if values == "all" else parser.format_common_help(), end="")  # noqa: T201
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    """Every setting is a flag named after its field, grouped by section."""
    parser = _ServeParser(
        "",
        usage="aioserve [serve] [--config FILE] [--set SECTION.NAME=VALUE] [--FLAG VALUE ...]",
        description="Serve a language model over an OpenAI-compatible HTTP API.",
        add_help=False,
    )
    parser.add_argument(
        *("-h", "--help"),
        action=_Help,
        nargs="?",
        choices=("all",),
        metavar="all",
        help="show the commonest settings and exit; --help=all: every setting",
    )
    parser.add_argument("--version", action="version", version=f"aioserve {__version__}")
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file of settings, or the name of a shipped one"
    )
    parser.add_argument(
        "--set",
        metavar="SECTION.NAME=VALUE",
        action="append",
        default=[],
        type=assignment,
        help="set any setting or policy option: scheduler.options.chunk_size=64; repeatable",
    )
    groups: dict[str, TakesArguments] = {}
    settings = []
    for section, field in iter_settings():
        if section not in groups:
            groups[section] = parser.add_argument_group(section)
        settings += _add_flag(groups[section], section, field)
    parser.settings = settings
    return parser


def load_config(arguments: argparse.Namespace) -> EngineConfig:
    """Return the settings that `arguments` ask for. Raises `ConfigError`."""
    flags = [
        (name, value)
        for name, value in vars(arguments).items()
        if "." in name and value is not None  # no dot: an argument that is not a setting
    ]
    try:
        return EngineConfig.load(arguments.config, [*arguments.set, *flags])
    except ConfigError as error:
        if not isinstance(error, SettingError) or error.where is not None:
            from aioserve.cli.settings import with_policy

            overridden = {name for name, _ in (*arguments.set, *flags)}
            raise with_policy(error, arguments.config, overridden) from error.__cause__
        # Named as it was written: a flag wins over --set.
        written = error.setting
        if error.setting in dict(flags):
            written = f"--{error.setting.rpartition('.')[2].replace('_', '-')}"
        elif error.setting in dict(arguments.set):
            written = f"--set {error.setting}"
        raise ConfigError(f"{written}: {error.why}") from error


def _add_flag(
    group: TakesArguments, section: str, field: msgspec.structs.FieldInfo
) -> list[argparse.Action]:
    """Add the flag of a setting; returns the actions that were added: one, or none."""
    kind, description = read_annotation(field.type)
    if typing.get_origin(kind) is dict:
        return []  # --set reaches inside of mappings
    help_text = description.replace("%", "%%")
    if field.default not in (None, ()):  # None is explained in the description
        help_text += f" (default: {show_default(field.default)})"
    options: dict[str, Any] = {"dest": f"{section}.{field.name}", "help": help_text}
    if typing.get_origin(kind) is tuple:
        metavar = "NAME=PATH" if "NAME=PATH" in description else "NAME"
        options |= {"action": "append", "metavar": metavar}
    elif any(
        typing.get_origin(k) is tuple for k in typing.get_args(typing.get_args(field.type)[0])
    ):
        options |= {"nargs": "+", "metavar": "NAME"}
    elif kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif typing.get_origin(kind) is typing.Literal:
        options["choices"] = [str(value) for value in typing.get_args(kind)]
    else:
        options["metavar"] = {int: "N", float: "NUMBER", str: "TEXT"}.get(kind, "VALUE")
    return [group.add_argument(f"--{field.name.replace('_', '-')}", **options)]


def show_default(default: Any) -> str:
    if isinstance(default, bool):
        return "yes" if default else "no"
    return f"{default:g}" if isinstance(default, float) else str(default)
