"""What the text of a reply must look like: a schema, a pattern, a choice or a grammar.

As it is asked for, and what cannot be meant. Knows nothing about tokens; `grammars` does.
"""

from typing import Any

import msgspec

from aioserve.errors import RequestError

WAYS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


class StructuredOutputs(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    repr_omit_defaults=True,
    weakref=True,
):
    """One way to say it, in the words of vLLM. Raises `RequestError` for none or several.

    Whether it can be compiled is known at the engine's door.
    """

    json: dict[str, Any] | str | None = None  # a JSON schema
    json_object: bool | None = None  # any JSON object
    regex: str | None = None  # all of the text, in the syntax of Rust's `regex`
    choice: tuple[str, ...] | None = None  # one of these texts
    grammar: str | None = None  # Lark as llguidance has it, or the GBNF (EBNF) of llama.cpp
    #: Free text; what follows a trigger is bound by a schema: {"structures": [...], "triggers": []}
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: bool | None = None  # in JSON: between its parts

    def __post_init__(self) -> None:
        given = [name for name in WAYS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise RequestError(
                f"structured_outputs takes one of {', '.join(WAYS)}, got "
                f"{' and '.join(given) or 'none'}",
                param="structured_outputs",
            )
        if self.choice is not None and not self.choice:
            raise RequestError(
                "structured_outputs.choice must hold at least one text",
                param="structured_outputs.choice",
            )

    @property
    def way(self) -> str:
        """The name of the field that is given."""
        return next(name for name in WAYS if getattr(self, name) not in (None, False))
