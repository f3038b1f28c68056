"""Tab in a shell: commands, flags, and names of policies, configurations, settings and models.

`argcomplete` asks the parsers themselves, so what is offered is what is taken; this says which
arguments are names, and of what. Knows the parsers when they parse; knows no flag but those.
"""

import argparse
import importlib
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NoReturn

from aioserve.errors import ConfigError
from aioserve.support.arguments import Parser

INSTALL_LINE = "pip install argcomplete"

# argcomplete's: set by a shell that wants completions and no run; which word is the program.
ASKED = "_ARGCOMPLETE"


def run_completion(argv: Sequence[str]) -> int:
    """`aioserve completion SHELL`: prints what the shell must read. Returns the exit code; raises
    `ConfigError` without `argcomplete`.
    """
    parser = Parser(
        "completion",
        description="Print the shell completion script of the command aioserve.",
        epilog='In ~/.bashrc: eval "$(aioserve completion bash)". In ~/.zshrc, after compinit: '
        'eval "$(aioserve completion zsh)".',
    )
    parser.add_argument(
        "shell", choices=("bash", "zsh"), help="shell to print the completion script for"
    )
    arguments = parser.parse_args(argv)
    try:
        import argcomplete
    except ImportError as error:
        raise ConfigError(f"completion needs argcomplete ({error}): {INSTALL_LINE}") from error
    print(argcomplete.shellcode(["aioserve"], shell=arguments.shell))
    return 0


def answer_shell(
    commands: Collection[str],
    tools: Collection[str],
    build_parser: Callable[[], argparse.ArgumentParser],
    run_tool: Callable[[str], object],
) -> NoReturn:
    """Tell the shell what may stand at the cursor of its line, and end the process.

    `commands` have the flags of `build_parser`, the first of them also without its name; `tools` a
    parser each, which `run_tool` comes to when it parses.
    """
    try:
        from argcomplete.lexers import split_line
    except ImportError:
        os._exit(1)  # the shell offers files
    line, point = os.environ["COMP_LINE"], int(os.environ["COMP_POINT"])
    start = int(os.environ[ASKED])
    words = split_line(line, point)[3][start:]  # those before the cursor's
    command = words[0] if words else ""
    if command in {*commands, *tools}:
        os.environ[ASKED] = str(start + 1)  # it is the program, for the parser
    if command in tools:
        Parser.instead_of_parsing = _offer
        run_tool(command)
        os._exit(1)  # it parses nothing
    parser = build_parser()
    if not words:
        parser.add_argument("command", nargs="?", choices=[*commands, *tools])
    _offer(parser)


def _offer(parser: argparse.ArgumentParser) -> NoReturn:
    import argcomplete

    argcomplete.autocomplete(parser, always_complete_options=False, default_completer=_complete)
    os._exit(1)


def _complete(prefix: str, action: argparse.Action, **_: Any) -> list[str]:
    """Return names, and files: nearly all that has a name may lie in a file as well."""
    from argcomplete.completers import FilesCompleter

    found = [name for name in _names_of(action) if name.startswith(prefix)]
    return [*found, *FilesCompleter()(prefix)]


def _names_of(action: argparse.Action) -> Iterable[str]:
    if not action.option_strings and action.dest in ("config", "configs"):
        return (*_names(_CONFIGS), *_names(_POLICIES))  # of the lab, which takes both
    return _names(_NAMES.get(action.dest, ""))


def _names(path: str) -> Iterable[str]:
    """Return what the function there returns, `package.module:function`; nothing of no path."""
    if not path:
        return ()
    module, _, function = path.partition(":")
    found: Iterable[str] = getattr(importlib.import_module(module), function)()
    return found


def call_formats() -> Iterable[str]:
    """Return the names of formats of tool calls."""
    from aioserve.engine.chat.reply_format import available_formats

    return ("auto", "none", *available_formats())


def reasoning_formats() -> Iterable[str]:
    """Return the names of formats of reasoning."""
    from aioserve.engine.chat.reply_format import MARKS

    return ("auto", "none", *MARKS)


def models() -> Iterable[str]:
    """Return the names of models that are on this machine."""
    from aioserve.config import EMBEDDED_MODEL
    from aioserve.model_source.downloads import DOWNLOADS, models_folder

    fetched = [name for name in DOWNLOADS if (models_folder() / f"{name}.gguf").is_file()]
    return (EMBEDDED_MODEL, *fetched)


def settings() -> Iterable[str]:
    """Return all settings as `SECTION.NAME=`."""
    from aioserve.config import iter_settings

    return [f"{section}.{field.name}=" for section, field in iter_settings()]


_CONFIGS, _POLICIES = "aioserve.support.files:config_names", "aioserve.scheduler:available_policies"
# By the name under which a parser keeps the argument: a function that is imported when it is asked.
_NAMES = {
    "scheduler.policy": _POLICIES,
    "server.tool_call_parser": f"{__name__}:call_formats",
    "server.reasoning_parser": f"{__name__}:reasoning_formats",
    "shadow.shadow_policy": _POLICIES,
    "policy": _POLICIES,
    "config": _CONFIGS,
    "workload": "aioserve.support.files:workload_names",
    "fleet": "aioserve.support.files:fleet_names",
    "model.model": f"{__name__}:models",
    "speculation.draft_model": f"{__name__}:models",
    "set": f"{__name__}:settings",
}
