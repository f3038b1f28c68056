"""The command `settings`: every setting as a YAML file, a page of Markdown, or a JSON schema.

All of it is made from the structs of `aioserve.config`: a setting is declared once, and none is
known by name here. Last: what is wrong with the policy that a file of settings names.
"""

import re
import textwrap
import types
import typing
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from aioserve.config import EngineConfig, SchedulerConfig, iter_settings
from aioserve.errors import AioserveError, ConfigError
from aioserve.support.arguments import Parser, read_annotation
from aioserve.support.files import write

HEAD = """\
# Every setting

`python -m aioserve settings --format markdown` prints this page from the structs of
`aioserve/config`, and a test keeps it current. A setting is a key in its section of a YAML file
(`python -m aioserve --config FILE`), a flag named after it, and `--set SECTION.NAME=VALUE`; flags
override `--set`, which overrides the file. `like: vllm` (or another engine's name) at the top of a
file lays [that engine's defaults](coming-from-vllm.md) under it.

```bash
python -m aioserve settings > all.yaml                            # commented, with the defaults
python -m aioserve settings --format json-schema > aioserve.json  # completion in an editor
```

An editor that knows YAML's language server reads the schema where a file's first line is
`# yaml-language-server: $schema=aioserve.json`. No setting is read from the environment; secrets
are: `AIOSERVE_API_KEYS` and `AIOSERVE_SSL_KEYFILE_PASSWORD` ([operations](operations.md)).
`AIOSERVE_MODELS` is the folder of fetched models, and `AIOSERVE_KERNELS` chooses [a variant of the
kernels](instruction-sets.md).
"""

WIDTH = 96


class Setting(NamedTuple):
    """One setting as users see it."""

    section: str
    name: str
    annotation: Any
    default: Any
    description: str

    @property
    def has_flag(self) -> bool:
        """Whether the command line has a flag of this name: mappings have none."""
        return typing.get_origin(read_annotation(self.annotation)[0]) is not dict

    @property
    def kind_in_words(self) -> str:
        """The values that may be written, as `number` or `one of none, memory, disk`."""
        return _in_words(self.annotation)


def all_settings() -> Iterator[Setting]:
    """Yield every setting, section by section."""
    for section, field in iter_settings():
        _, description = read_annotation(field.type)
        default = field.default
        if default is msgspec.NODEFAULT:
            default = field.default_factory()
        yield Setting(section, field.name, field.type, default, description)


def as_yaml() -> str:
    """Return a YAML file that states every setting with its default, each below what it does.

    Such a file changes nothing: `EngineConfig.load` of it equals `EngineConfig()`.
    """
    lines = [
        "# Every setting of aioserve with its default: keep the lines that you change.",
        "# python -m aioserve --config THIS_FILE",
    ]
    section = None
    for setting in all_settings():
        if setting.section != section:
            section = setting.section
            lines += ["", f"{section}:"]
        words = f"{setting.description} [{setting.kind_in_words}]"
        lines += [f"  # {line}" for line in textwrap.wrap(words, WIDTH - 4)]
        lines.append(f"  {setting.name}: {_yaml(setting.default)}")
    return "\n".join(lines) + "\n"


def as_markdown() -> str:
    """Return the text of docs/settings.md: a table of the settings of each section."""
    lines = [HEAD]
    section = None
    for setting in all_settings():
        if setting.section != section:
            if section is not None:
                lines.append("")
            section = setting.section
            lines += [f"## `{section}`", ""]
            lines += ["| key | value | default | what it does |", "|---|---|---|---|"]
        flag = "" if setting.has_flag else " (no flag: `--set`)"
        default = "" if setting.default is None else f"`{_yaml(setting.default)}`"
        description = re.sub(r"([|<>*])", r"\\\1", setting.description)
        lines.append(
            f"| `{setting.name}`{flag} | {setting.kind_in_words} | {default} | {description} |"
        )
    return "\n".join(lines) + "\n"


def as_json_schema() -> dict[str, Any]:
    """Return a JSON schema (2020-12) of configuration files."""
    schema = msgspec.json.schema(EngineConfig)
    config = schema["$defs"]["EngineConfig"]
    config["properties"]["like"] = {
        "description": "Another engine, whose settings count where this file states none.",
        "type": "string",
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def run_settings(words: Sequence[str]) -> int:
    """`aioserve settings`; returns the exit code."""
    parser = Parser(
        "settings",
        description="Print every setting with its meaning and its default.",
        epilog="A configuration file with all of them: aioserve settings > aioserve.yaml",
    )
    parser.add_argument(
        "--format",
        choices=("yaml", "markdown", "json-schema"),
        default="yaml",
        help="a configuration file, a page, or a JSON schema for an editor (default: yaml)",
    )
    parser.add_argument("--output", metavar="FILE", help="file to write (default: print it)")
    arguments = parser.parse_args(words)
    if arguments.format == "json-schema":
        text = msgspec.json.format(msgspec.json.encode(as_json_schema()), indent=2).decode() + "\n"
    else:
        text = as_yaml() if arguments.format == "yaml" else as_markdown()
    if arguments.output is None:
        print(text, end="")  # noqa: T201
    write(arguments.output, text.encode())
    return 0


def _in_words(kind: Any) -> str:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _in_words(inner[0])
    if origin in (typing.Union, types.UnionType):
        words = dict.fromkeys(_in_words(each) for each in inner if each is not type(None))
        return " or ".join(words)
    if origin is typing.Literal:
        return "one of " + ", ".join(map(str, inner))
    if origin in (tuple, list):
        return "list"
    if origin is dict or kind is dict:
        return "mapping"
    names = {int: "whole number", float: "number", str: "text", bool: "true or false"}
    return names.get(kind, getattr(kind, "__name__", str(kind)))


def _yaml(value: Any) -> str:
    """Write a value on one line: JSON is YAML."""
    return msgspec.json.encode(value).decode()


class _Policy(msgspec.Struct):
    """The policy that a file names; other settings of its section are not read."""

    policy: str = SchedulerConfig().policy
    options: dict[str, Any] = {}


def with_policy(error: ConfigError, config: str | None, overridden: Collection[str]) -> ConfigError:
    """Return what is wrong in a file of settings, and with it what is wrong with the policy that
    the file names, which its own class knows. `overridden` are the settings that flags state, as
    dotted names: a policy that a flag replaces is not asked for.
    """
    from aioserve.config.load import find_policies, read_sections
    from aioserve.scheduler import BaseScheduler, load_policy
    from aioserve.support.files import find_config
    from aioserve.support.mistakes import ConfigErrors

    if config is None or "scheduler.policy" in overridden:
        return error
    known = error.mistakes if isinstance(error, ConfigErrors) else (str(error),)
    try:
        path = find_config(config)
        tree = {"scheduler": read_sections(path).get("scheduler", {})}
        msgspec.convert(tree["scheduler"], _Policy)  # else its type is among what is known
        find_policies(tree, path, overridden)
        stated = msgspec.convert(tree["scheduler"], _Policy)
        policy = load_policy(stated.policy)
        if issubclass(policy, BaseScheduler):
            policy.parse_options(stated.options)
    except msgspec.ValidationError:
        return error
    except AioserveError as another:
        said = f"{config}: {str(another).removeprefix(f'{config}: ')}"
        return error if str(another) in known else ConfigErrors(*known, said)
    return error
