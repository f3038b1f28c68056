"""OpenAI's `response_format`: what it asks of the text of a reply.

Knows its shapes; what a schema means is known to its compiler.
"""

from typing import Any, Literal

from aioserve.errors import RequestError
from aioserve.params import StructuredOutputs
from aioserve.server.request_part import RequestPart


class JsonSchema(RequestPart, kw_only=True, omit_defaults=True):
    """A schema by name, as OpenAI's clients send it. `strict` or not, it is kept to."""

    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(RequestPart, kw_only=True, omit_defaults=True):
    """OpenAI's way to ask for structured outputs, and vLLM's `structural_tag` in the same place."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None

    @property
    def field(self) -> str:
        """Where in the body stands what the text is bound to."""
        if self.type == "json_schema":
            return "response_format.json_schema.schema"
        return "response_format.format" if self.format is not None else "response_format"

    def structured_outputs(self) -> StructuredOutputs | None:
        """What it asks for. Raises `RequestError` for parts that are missing or out of place."""
        needed = [] if self.type != "json_schema" else ["json_schema"]
        if self.type == "structural_tag":
            has_old_shape = self.structures is not None or self.triggers is not None
            needed = ["structures", "triggers"] if has_old_shape else ["format"]
        for name in ("json_schema", "structures", "triggers", "format"):
            is_given = getattr(self, name) is not None
            if is_given != (name in needed):
                verb = "takes no" if is_given else "needs"
                raise RequestError(
                    f"response_format of type {self.type} {verb} {name}",
                    param=f"response_format.{name}",
                )
        if self.type == "json_object":
            return StructuredOutputs(json_object=True)
        if self.json_schema is not None:
            if self.json_schema.schema is None:
                raise RequestError(
                    "response_format.json_schema needs schema",
                    param="response_format.json_schema.schema",
                )
            return StructuredOutputs(json=self.json_schema.schema)
        if self.type == "structural_tag":
            tag = {name: getattr(self, name) for name in needed}
            return StructuredOutputs(structural_tag=tag)
        return None
