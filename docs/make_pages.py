"""Writes what is made from the source: three pages of docs/, and a table each of two more.

    python docs/make_pages.py

`policies.md` is the catalogue of what is in `policies/`; `policy-api.md` lists what a policy can
read and call: attributes of classes with a comment `#:`, those that `__init__` assigns, with the
comments beside them (or beside the field of `RequestSpec` that it assigns), properties and
methods. `fields.md` says of every known field of a body what becomes of it on each route that
generates. The table of operators' routes in `operations.md` is made of the commands in
`aioserve.engine.operations`, that of ranges in `http-api.md` of `RANGES` and of the comments beside
the fields of `SamplingParams`.
"""

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aioserve.apis import anthropic, responses
from aioserve.engine.operations import OPERATOR_COMMANDS
from aioserve.kv_cache import KVCacheManager, StatePool, WindowPool
from aioserve.params import BIAS_RANGE, RANGES, RUNNER_PARAMETERS, SamplingParams
from aioserve.request import Request, RequestSpec, RequestStatus, WaitReason
from aioserve.scheduler import (
    AdmissionPart,
    BaseScheduler,
    BudgetPart,
    Memory,
    OnlineStepTime,
    OrderPart,
    PeakMemory,
    RequestQueue,
    Step,
    VictimPart,
    hinted_flag,
    hinted_number,
    hinted_text,
    load_policy,
    make_successor,
)
from aioserve.scheduler.descriptions import read_options
from aioserve.server import completions
from aioserve.server.chat import routes as chat
from aioserve.server.fields import FIELDS, Hint, Rule, Skipped, Unserved, rules_of

HERE = Path(__file__).parent

CATALOGUE_HEAD = """\
# Scheduling policies that come with aioserve

`python docs/make_pages.py` writes this page from the policies' files, and a test keeps it
current. Each policy is one file of [policies](../policies), with a configuration in
[configs](../configs) that has all its options: `python -m aioserve --config configs/fair.yaml`,
or `--policy fair` for the defaults. To find out which one is better for your traffic, see
[comparing policies](comparing-policies.md). The zoo, [policies/zoo](../policies/zoo), has more
policies, from papers and other engines: `--policy zoo.srpt`, or `--config zoo.srpt` for the file
in [configs/zoo](../configs/zoo). [The zoo](zoo.md) ranks all of them on the same workloads.
"""

FIELDS_HEAD = """\
# Fields of requests

`python docs/make_pages.py` writes this page from `aioserve/server/fields.py` and the structs of
the routes, and a test keeps it current. It lists every field that clients of OpenAI, Anthropic,
vLLM, SGLang and others are known to send to the routes that generate. [The HTTP
API](http-api.md) explains the served fields.

- **served**: the field has its documented effect.
- **hint**: any value is accepted, and no value changes the reply.
- **passed over**: a feature of a vendor's servers. The request is served without it, and a line in
  the log says so.
- **refused**: a 400 that names the field, unless its value has no effect: null, a value that the
  last column lists, or false (if it lists only `true`, false is refused).
- Any other field gets a 400 with code `unknown_parameter` and the nearest name.
  `--ignore-unknown-fields` ignores such fields, and the fields of other engines, which have a star.

| field | completions | chat | responses | messages | |
|---|---|---|---|---|---|
"""

#: The routes that generate, and what decodes their bodies.
GENERATING = {
    "completions": completions.decoder,
    "chat": chat.decoder,
    "responses": responses.decoder,
    "messages": anthropic.create_decoder,
}

HINTED: tuple[Callable[..., Any], ...] = (hinted_number, hinted_text, hinted_flag)

HEAD = """\
# Policy API

`python docs/make_pages.py` writes this page from the docstrings, and a test keeps it current. To
learn how to write a policy, read [writing a policy](writing-a-policy.md) and, for examples,
[policy recipes](policy-recipes.md). Import all names from `aioserve.scheduler`.
"""

# Section, class, what of it; None: all that is public.
SECTIONS: list[tuple[str, type[Any], list[str] | None]] = [
    (
        "What you write: `BaseScheduler`",
        BaseScheduler,
        [
            *("schedule", "order", "group_by", "victim", "draft_length", "on_finish"),
            *("decoded_on", "retention", "add_request", "update_from_output", "gauges"),
        ],
    ),
    (
        "What you may say of it: `BaseScheduler`",
        BaseScheduler,
        [
            *("admits_in_order", "keeps_decoding", "policy_api", "reorder_every"),
            *("runs_whole_prompts", "uses_step_time", "uses_predicted_tokens"),
            "wants_row_values",
            "sets_frequency",
        ],
    ),
    (
        "What you have: `self`",
        BaseScheduler,
        [
            *("new_step", "options", "clock", "running", "waiting", "kv_cache", "memory"),
            *("paused_requests", "estimate_offload", "pin", "unpin", "retain", "wake_at"),
            "set_frequency",
            *("reorder", "reorder_all", "num_steps"),
            *("max_num_seqs", "max_num_batched_tokens", "max_loras", "running_adapters"),
            *("max_draft_tokens", "step_time", "predicted_tokens", "predicted_lengths"),
        ],
    ),
    (
        "One policy after another: `BaseScheduler`",
        BaseScheduler,
        ["take_over", "get_request", "get_requests"],
    ),
    (
        "What steps take: `self.step_time`, an `OnlineStepTime`",
        OnlineStepTime,
        [
            *("seconds", "max_prefill_tokens", "seconds_per_step", "seconds_per_prompt_token"),
            *("is_fitted", "last_seconds", "num_steps"),
        ],
    ),
    ("The step: `Step`", Step, None),
    ("A request: `Request`", Request, None),
    ("A part of a composed policy, its order: `OrderPart`", OrderPart, None),
    (
        "A part, its budget: `BudgetPart`",
        BudgetPart,
        ["num_tokens", "max_requests", "for_prompts", "returned"],
    ),
    ("A part, its admission: `AdmissionPart`", AdmissionPart, ["begin", "ask"]),
    ("A part, its victims: `VictimPart`", VictimPart, ["victim", "displaceable"]),
    (
        "The line: `self.waiting`, a `RequestQueue`",
        RequestQueue,
        ["num_tokens", "heads", "head", "group", "take_changed", "from_key"],
    ),
    (
        "The cache: `self.kv_cache`, a `KVCacheManager`",
        KVCacheManager,
        [
            *("block_size", "num_slots", "estimate_cached_tokens", "estimate_lost_tokens"),
            *("get_external_prefix", "refresh"),
        ],
    ),
    ("The memory: `self.memory`, a `Memory`", Memory, None),
    ("The memory to come: a `PeakMemory`", PeakMemory, None),
    (
        "The states: `self.kv_cache.states`, a `StatePool`, or None for most models",
        StatePool,
        ["num_slots", "num_free_slots", "num_snapshots"],
    ),
    (
        "The windows: `self.kv_cache.windows`, a `WindowPool`, or None for most models",
        WindowPool,
        ["num_blocks", "num_free_blocks", "num_needed_blocks"],
    ),
]


def catalogue() -> str:
    """The page `policies.md`."""
    folder = HERE.parent / "policies"
    files = [(path.stem, path) for path in folder.glob("[!_]*.py")]
    files.append(("composed", folder / "composed/__init__.py"))
    parts, table = [], ["| policy | in a line |", "|---|---|"]
    for name, file in sorted(files):
        source = file.read_text(encoding="utf-8")
        policy = load_policy(f"aioserve.policies.{name}")
        title, _, text = (ast.get_docstring(ast.parse(source)) or "").partition("\n\n")
        table.append(f"| [{name}](#{name}) | {_prose(policy.__doc__)} |")
        parts += [f"## {name}\n", f"**{_prose(title)}**\n", _prose(text) + "\n"]
        if options := _options(source):
            parts += ["| option | default | |", "|---|---|---|", *options, ""]
    return "\n".join([CATALOGUE_HEAD, *table, "", *parts]).rstrip() + "\n"


def _options(source: str) -> list[str]:
    """A row for each field of the nested class `Options`."""
    return [f"| `{o.name}` | `{o.default!r}` | {o.note} |" for o in read_options(source)]


def render() -> str:
    """The page `policy-api.md`."""
    parts = [HEAD]
    for title, cls, names in SECTIONS:
        parts.append(f"## {title}\n")
        if names is None:
            parts.append(_prose(cls.__doc__) + "\n")
        found = _members(cls)
        for name in found if names is None else names:
            parts.append(found[name])
            if name == "take_over":
                parts.append(f"- `make_successor`, a function: {_prose(make_successor.__doc__)}")
            if cls is Request and name == "hints":
                parts += [
                    f"- `{f.__name__}({', '.join(inspect.signature(f).parameters)})`, a function: "
                    f"{_prose(f.__doc__)}"
                    for f in HINTED
                ]
        parts.append("")
    for enum in (RequestStatus, WaitReason):
        parts.append(f"## `{enum.__name__}`\n\n{_prose(enum.__doc__)}\n")
        comments = _comments(enum)
        for member in enum:
            note = comments.get(member.name)
            parts.append(f"- `{member.name}`" + (f": {note}" if note else ""))
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


TABLE = re.compile(
    r"(?<=<!-- made by docs/make_pages.py -->\n).*?(?=<!-- up to here -->)", re.DOTALL
)


def with_ranges(page: str) -> str:
    """The page `http-api.md`, with the table of today's ranges."""
    rows, notes = ["| field | range | |", "|---|---|---|"], _comments(SamplingParams)
    for name, numbers in RANGES.items():
        note = notes.get(name, "") + ("; not on every runner" if name in RUNNER_PARAMETERS else "")
        rows.append(f"| `{name}` | {numbers.words} | {note}".rstrip() + " |")
    rows.append(f"| values of `logit_bias` | {BIAS_RANGE.words} | whole or not |")
    table = "\n".join(["", *rows, "", ""])
    return TABLE.sub(lambda _: table, page)


def with_operators_routes(page: str) -> str:
    """The page `operations.md`, with the table of today."""
    rows = ["| `POST` | method of `AsyncClient` | effect |", "|---|---|---|"]
    for command in sorted(OPERATOR_COMMANDS, key=lambda command: command.http.path[:3]):
        name = command.operation()
        rows.append(f"| `{command.http.path}` | `{name}` | {_prose(command.__doc__)} |")
    table = "\n".join(["", *rows, "", ""])
    return TABLE.sub(lambda _: table, page)


def _members(cls: type[Any]) -> dict[str, str]:
    """A line of Markdown for each public attribute, property and method, in order of the source;
    those of the classes in `aioserve.scheduler` that it is put together of come first.
    """
    found: dict[str, str] = {}
    for kind in cls.__bases__:
        if kind.__module__.startswith("aioserve.scheduler"):
            found |= _members(kind)
    return found | _own_members(cls)


def _own_members(cls: type[Any]) -> dict[str, str]:
    source = textwrap.dedent(inspect.getsource(cls))
    lines = source.splitlines()
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    attributes: dict[str, str] = {}
    callables: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.AnnAssign):
            attributes |= _class_attribute(node, lines)
        if not isinstance(node, ast.FunctionDef):
            continue
        if node.name == "__init__":
            for statement in node.body:
                attributes |= _attribute(statement, lines)
        elif not node.name.startswith("_"):
            text = _prose(ast.get_docstring(node)) or _inherited(cls, node.name)
            kinds = {d.id for d in node.decorator_list if isinstance(d, ast.Name)}
            if kinds & {"property", "cached_property"}:
                attributes[node.name] = f"- `{node.name}`: {text}"
            else:
                callables[node.name] = f"- `{node.name}({_signature(node)})`: {text}"
    return attributes | callables


def _attribute(statement: ast.stmt, lines: list[str]) -> dict[str, str]:
    target: ast.expr
    if isinstance(statement, ast.Assign):
        target = statement.targets[0]
    elif isinstance(statement, ast.AnnAssign):
        target = statement.target
    else:
        return {}
    if not isinstance(target, ast.Attribute) or target.attr.startswith("_"):
        return {}
    _, _, comment = lines[(statement.end_lineno or statement.lineno) - 1].partition("  # ")
    if statement.value is not None and f"spec.{target.attr}" in ast.unparse(statement.value):
        comment = _comments(RequestSpec).get(target.attr, comment)
    note = f": {comment.strip()}" if comment else ""
    return {target.attr: f"- `{target.attr}`{note}"}


def _class_attribute(node: ast.AnnAssign, lines: list[str]) -> dict[str, str]:
    """With the comment `#:` before it and its default; what has none is not shown."""
    first = node.lineno - 1
    while lines[first - 1].strip().startswith("#: "):
        first -= 1
    comment = " ".join(line.strip().removeprefix("#: ") for line in lines[first : node.lineno - 1])
    if not comment or node.value is None:
        return {}
    name = ast.unparse(node.target)
    return {name: f"- `{name} = {ast.unparse(node.value)}`: {comment}"}


def _comments(cls: type[Any]) -> dict[str, str]:
    """The comments beside the members of an enumeration, or the fields of a struct."""
    found = {}
    for line in inspect.getsource(cls).splitlines():
        code, _, comment = line.partition("  # ")
        if comment:
            found[code.split(" = ")[0].split(":")[0].strip()] = comment.strip()
    return found


def fields_page() -> str:
    """The page of all fields of bodies."""
    served = {name for each in GENERATING.values() for name in each.served.__struct_fields__}
    rules = {
        route: rules_of(route, each.served.__struct_fields__) for route, each in GENERATING.items()
    }
    names = served.union(*rules.values())
    return FIELDS_HEAD + "".join(_field_row(name, rules) for name in sorted(names))


def _field_row(name: str, rules: dict[str, dict[str, Rule]]) -> str:
    found = {route: rules[route].get(name) for route in rules}
    words = {Hint: "hint", Skipped: "passed over", Unserved: "refused", type(None): "**served**"}
    cells = [words[type(rule)] for rule in found.values()]
    by_note: dict[str, list[str]] = {}
    for route, rule in found.items():
        if note := _note(rule):
            by_note.setdefault(note, []).append(route)
    notes = [
        note if len(by_note) == 1 else f"{', '.join(routes)}: {note}"
        for note, routes in by_note.items()
    ]
    star = "\\*" if name in FIELDS and FIELDS[name].is_foreign else ""
    return " | ".join([f"| `{name}`{star}", *cells, "; ".join(notes)]).rstrip() + " |\n"


def _note(rule: Rule | None) -> str:
    match rule:
        case Hint(effect=words) | Skipped(what=words):
            return words
        case Unserved(no_ops=no_ops, instead=instead):
            values = ", ".join(f"`{json.dumps(value)}`" for value in no_ops)
            empty = f"{values} asks for nothing" if values else ""
            return ", ".join(filter(None, (empty, f"use {instead}" if instead else "")))
    return ""


def _signature(node: ast.FunctionDef) -> str:
    arguments = ast.unparse(node.args)
    return arguments.removeprefix("self").removeprefix(", ")


def _prose(docstring: str | None) -> str:
    """All paragraphs in one line; what is indented stands in a block of its own."""
    if docstring is None:
        return ""
    blocks = []
    for paragraph in inspect.cleandoc(docstring).split("\n\n"):
        if paragraph.startswith("    "):
            blocks.append("\n\n```text\n" + textwrap.dedent(paragraph) + "\n```\n\n")
        else:
            blocks.append(" ".join(paragraph.split()))
    return " ".join(blocks).replace(" \n\n", "\n\n").replace("\n\n ", "\n\n").strip()


def _inherited(cls: type[Any], name: str) -> str:
    for base in cls.__mro__[1:]:
        if doc := getattr(getattr(base, name, None), "__doc__", None):
            return _prose(doc)
    return ""


if __name__ == "__main__":
    (HERE / "policies.md").write_text(catalogue(), encoding="utf-8")
    (HERE / "policy-api.md").write_text(render(), encoding="utf-8")
    (HERE / "fields.md").write_text(fields_page(), encoding="utf-8")
    for name, renew in (("operations.md", with_operators_routes), ("http-api.md", with_ranges)):
        page = HERE / name
        page.write_text(renew(page.read_text(encoding="utf-8")), encoding="utf-8")
