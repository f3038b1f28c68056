"""The wire structs that all APIs share, and those of completions: one for server and client.

An API with a folder has its own structs there. Requests refuse unknown fields; those that are
known but not served are in `fields`. Knows nothing about HTTP or the engine.
"""

from collections.abc import Callable
from functools import lru_cache
from operator import attrgetter
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from aioserve.errors import RequestError
from aioserve.outputs import FinishReason, TokenLogprobs
from aioserve.params import NO_DEFAULTS, SamplingDefaults, SamplingParams, StructuredOutputs
from aioserve.request import Hints, RequestSpec


class RequestPart(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Base of what clients send. `null` means the default everywhere."""


# OpenAI's `response_format`: what it asks of the text of a reply. Knows its shapes; what a schema
# means is known to its compiler.


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
        """The place in the body of what the text is bound to."""
        if self.type == "json_schema":
            return "response_format.json_schema.schema"
        return "response_format.format" if self.format is not None else "response_format"

    def structured_outputs(self) -> StructuredOutputs | None:
        """Return what it asks for. Raises `RequestError` for parts that are missing or out of
        place.
        """
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


# The wire structs of log probabilities, of every format that has them.


class PromptLogprob(msgspec.Struct, kw_only=True):
    """One token at a position of the prompt, as vLLM shows it."""

    logprob: float
    rank: int  # 1: the most likely
    decoded_token: str


#: By token of the prompt; null for the first. By token id: the prompt's own, then alternatives.
PromptLogprobs = list[dict[int, PromptLogprob] | None]


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Parallel lists, one entry per token; of the first of an echoed prompt, nothing is known."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(msgspec.Struct, kw_only=True):
    """One alternative token at a position, with its log probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob, kw_only=True):
    """The sampled token and its alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    """Logprobs of a reply, one entry per token."""

    content: list[ChatTokenLogprob]


DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, for /v1/completions

# JSON integers have no limit; those of the engine have 64 bits.
Int = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]

# A text that the engine refuses if it is empty.
Text = Annotated[str, Meta(extra_json_schema={"minLength": 1})]

# What is known and not served, inside of what is: refused by the handler, which knows its place.
_NOTHING: dict[str, Any] = {"enum": [None, False, 0, "", [], {}], "description": "Not served."}
Empty = Annotated[Any, Meta(extra_json_schema=_NOTHING)]


# Requests


class ModelRequest(RequestPart, kw_only=True, omit_defaults=True):
    """Base of bodies that are for a model: the one that is served, if they name none."""

    model: str | None = None


class EngineRequest(ModelRequest, kw_only=True, omit_defaults=True):
    """Base of bodies that bring prompts to the engine, with fields for the policy."""

    request_id: str | None = None  # as in vLLM, but it is the id of the response as it stands
    truncate_prompt_tokens: Int | None = None
    priority: Int | None = None  # smaller is more urgent, under a policy that looks
    user: str | None = None
    timeout: float | None = None  # extension: seconds until finish_reason "timeout"
    cache_salt: str | None = None  # as in vLLM: prefixes are shared within one salt only
    hints: Hints | None = None  # extension: named values for the policy

    def request_fields(self) -> dict[str, Any]:
        """Keyword arguments of `AsyncEngine.add_request`, but for the id; no null among them."""
        given = zip(_ENGINE_FIELDS, _engine_values(self), strict=True)
        return {name: value for name, value in given if value is not None}


_ENGINE_FIELDS = tuple(
    name
    for name in ("timeout", *RequestSpec.__struct_fields__)  # which becomes a deadline
    if name in EngineRequest.__struct_fields__ and name != "request_id"
)


_engine_values: Callable[[EngineRequest], tuple[Any, ...]] = attrgetter(*_ENGINE_FIELDS)


class StreamOptions(RequestPart, kw_only=True, omit_defaults=True):
    """The options of a stream: which usage its chunks carry besides deltas."""

    include_usage: bool | None = None  # a last chunk with the usage of the whole request
    continuous_usage_stats: bool | None = None  # usage of its sample so far in every chunk
    include_obfuscation: bool | None = None  # a hint: chunks are not padded here


class UsageOptions(RequestPart, kw_only=True, omit_defaults=True):
    """The wish for usage, as OpenRouter has it: with `include`, a stream ends with it, as with
    `stream_options.include_usage`; whole answers always have it.
    """

    include: bool | None = None


class SamplingRequest(EngineRequest, kw_only=True, omit_defaults=True):
    """Base of bodies of routes that generate: sampling, and fields for the policy."""

    stream: bool | None = None
    min_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    seed: Int | None = None
    stop: str | tuple[str, ...] | None = None
    include_stop_str_in_output: bool | None = None
    stop_token_ids: tuple[Int, ...] | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[Int, float] | None = None  # keys are token ids in strings
    allowed_token_ids: tuple[Int, ...] | None = None
    bad_words: tuple[str, ...] | None = None
    structured_outputs: StructuredOutputs | None = None  # as in vLLM
    skip_special_tokens: bool | None = None

    def make_params(
        self,
        max_tokens: int | None,
        defaults: SamplingDefaults,
        default_max_tokens: int | None = None,
        *,
        wanted: StructuredOutputs | None = None,
        wanted_by: str = "response_format",
        **others: Any,
    ) -> SamplingParams:
        """Return the request's sampling parameters, `others` among them; what it leaves open is
        taken from `defaults`, its length from `default_max_tokens` if these have none. `wanted` is
        what the field `wanted_by` asks of the text. Raises `RequestError` that names the field.
        """
        if wanted is not None and self.structured_outputs is not None:
            raise RequestError(f"give {wanted_by} or structured_outputs, not both", param=wanted_by)
        others["max_tokens"] = max_tokens
        if wanted is None and _other_values(self) == _NO_OTHERS and _KEPT_FIELDS.issuperset(others):
            return _kept_params(defaults, default_max_tokens, _kept_values(self), **others)
        given = dict(zip(_SAMPLING_FIELDS, _sampling_values(self), strict=True)) | others
        given["structured_outputs"] = wanted or self.structured_outputs
        given = {name: value for name, value in given.items() if value is not None}
        return defaults.fill(given, max_tokens=default_max_tokens)


_SAMPLING_FIELDS = tuple(
    name for name in SamplingParams.__struct_fields__ if name in SamplingRequest.__struct_fields__
)
_sampling_values: Callable[[SamplingRequest], tuple[Any, ...]] = attrgetter(*_SAMPLING_FIELDS)

# Fields of one number or flag each, but for the seed, which is another one in every request; and
# what is the server's own.
_KEPT_FIELDS = frozenset(
    name
    for name, kind in SamplingParams.__annotations__.items()
    if name != "seed" and kind in (int, float, bool, int | None)
) | {"kept_special_tokens"}


_KEPT_OF_BODIES = [name for name in _SAMPLING_FIELDS if name in _KEPT_FIELDS]
_kept_values: Callable[[SamplingRequest], tuple[Any, ...]] = attrgetter(*_KEPT_OF_BODIES)
_OTHERS = [name for name in _SAMPLING_FIELDS if name not in _KEPT_FIELDS]
_other_values: Callable[[SamplingRequest], tuple[Any, ...]] = attrgetter(*_OTHERS)
_NO_OTHERS = (None,) * len(_OTHERS)


@lru_cache(maxsize=256, typed=True)
def _kept_params(
    defaults: SamplingDefaults,
    default_max_tokens: int | None,
    values: tuple[Any, ...],
    **others: Any,
) -> SamplingParams:
    """Return `SamplingDefaults.fill`, with values in the order of `_KEPT_OF_BODIES`: most requests
    ask for what another one has asked for, and parameters cannot change.
    """
    given = dict(zip(_KEPT_OF_BODIES, values, strict=True)) | others
    given = {name: value for name, value in given.items() if value is not None}
    return defaults.fill(given, max_tokens=default_max_tokens)


class GenerationRequest(SamplingRequest, kw_only=True, omit_defaults=True):
    """The fields that completions and chat completions share."""

    stream_options: StreamOptions | None = None
    usage: UsageOptions | None = None  # as at OpenRouter
    n: Int | None = None
    response_format: ResponseFormat | None = None
    prompt_logprobs: Int | None = None  # as in vLLM: alternatives per token of the prompt
    detokenize: bool | None = None  # false: no text; the ids come with return_token_ids
    return_token_ids: bool | None = None  # extension: choices carry ids and raw logprobs

    @property
    def bound_by(self) -> str | None:
        """The field that the text is bound by, if it is another than `structured_outputs`."""
        return None if self.response_format is None else self.response_format.field

    def sampling_params(
        self,
        max_tokens: int | None,
        logprobs: int | None,
        defaults: SamplingDefaults = NO_DEFAULTS,
        default_max_tokens: int | None = None,
        **others: Any,
    ) -> SamplingParams:
        """Return `make_params`, with what `response_format` asks of the text."""
        form = self.response_format
        wanted = None if form is None else form.structured_outputs()
        own = {name: getattr(self, name) for name in ("n", "prompt_logprobs", "detokenize")}
        own |= {"logprobs": logprobs, **others}
        return self.make_params(max_tokens, defaults, default_max_tokens, wanted=wanted, **own)


SHARED_SAMPLING_FIELDS = tuple(
    name for name in SamplingParams.__struct_fields__ if name in GenerationRequest.__struct_fields__
)


class CompletionRequest(GenerationRequest, kw_only=True, omit_defaults=True):
    """The JSON body of POST /v1/completions: prompts, and how to continue them."""

    prompt: Text | list[Text | Int | list[Int]]
    max_tokens: Int | None = DEFAULT_COMPLETION_TOKENS  # null: up to the model's limit
    logprobs: Int | None = None
    best_of: Int | None = None  # samples per prompt, of which the n best are told
    echo: bool | None = None  # the text begins with the prompt
    suffix: str | None = None  # the text stands between the prompt and this

    def prompts(self) -> list[str] | list[list[int]]:
        """Return one entry per prompt. Raises `RequestError` if texts and token ids are mixed."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        kinds = {type(item) for item in self.prompt}
        if len(kinds) != 1:
            what = "be empty" if not kinds else "mix texts, token ids and lists of token ids"
            raise RequestError(f"prompt must not {what}", param="prompt")
        # `kinds` has just shown what the type checker cannot see.
        return [self.prompt] if kinds == {int} else self.prompt  # type: ignore[return-value]


# Responses


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    """How many tokens of the prompt were found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, kw_only=True):
    """How many of the completion tokens are reasoning."""

    reasoning_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    """Token counts. Build it with `Usage.of`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET

    @classmethod
    def of(cls, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> "Usage":
        """Usage with the sum of prompt and completion tokens."""
        return cls(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
        )


class Choice(msgspec.Struct, kw_only=True):
    """Base of the choices of a reply: why a choice ended, and its tokens, without its text."""

    index: int
    finish_reason: FinishReason | None = None
    stop_reason: int | str | UnsetType = UNSET  # extension: which stop token or string matched
    token_ids: list[int] | UnsetType = UNSET  # extension: return_token_ids
    raw_logprobs: list[TokenLogprobs] | UnsetType = UNSET  # extension: return_token_ids


class Envelope(msgspec.Struct, kw_only=True):
    """Base of responses and chunks: id, time, model and usage, without the choices."""

    id: str
    created: int
    model: str
    usage: Usage | UnsetType | None = UNSET  # null: not yet; absent: not asked for


class CompletionChoice(Choice, kw_only=True):
    """A completion, or the next piece of one."""

    text: str
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET  # extension


class Completion(Envelope, kw_only=True):
    """Response of /v1/completions, and each chunk of its stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class ErrorInfo(msgspec.Struct, kw_only=True):
    """What went wrong; `param` is the path of the offending field."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(msgspec.Struct, kw_only=True):
    """Body of every error, and the last event of a stream that failed."""

    error: ErrorInfo


# The wire structs of /v1/models: limits and capabilities, in the words that clients look for.
# Lengths as vLLM and OpenRouter name them, modalities and parameters as OpenRouter does,
# capabilities as Ollama does.


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
