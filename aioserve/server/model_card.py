"""The wire structs of /v1/models: limits and capabilities, in the words that clients look for.

Lengths as vLLM and OpenRouter name them, modalities and parameters as OpenRouter does, capabilities
as Ollama does.
"""

from typing import Literal

import msgspec

from aioserve.params import NO_DEFAULTS, SamplingDefaults

Capability = Literal["completion", "embedding", "vision", "tools", "thinking"]


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """The modalities of a model's input and output, in the words of OpenRouter."""

    modality: str = "text->text"
    input_modalities: tuple[str, ...] = ("text",)
    output_modalities: tuple[str, ...] = ("text",)


class ModelCard(msgspec.Struct, kw_only=True):
    """A model of GET /v1/models: its lengths, capabilities and sampling defaults."""

    id: str
    created: int
    max_model_len: int  # as in vLLM: prompt and output together, in tokens
    context_length: int = 0  # the same, as at OpenRouter
    root: str  # as in vLLM: where it was loaded from
    parent: str | None = None  # as in vLLM: of an adapter, the model
    sampling: SamplingDefaults = NO_DEFAULTS  # extension: of requests that do not state it
    architecture: Architecture = Architecture()  # as at OpenRouter
    capabilities: list[Capability] = []  # in the words of Ollama
    supported_parameters: list[str] = []  # of chat, as at OpenRouter
    object: Literal["model"] = "model"
    owned_by: str = "aioserve"


class ModelList(msgspec.Struct, kw_only=True):
    """The response of GET /v1/models: the models and LoRA adapters that are served."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
