"""Fields that clients know and a route does not serve, declared once for all routes.

A route serves the fields of its struct. For each other name that is known, its row says what
becomes of it: a hint, which may hold anything; work that only a vendor's servers do, which is
passed over and logged; or a refusal, which names what to send instead. Knows nothing of decoding.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from aiohttp import web

from aioserve.errors import RequestError
from aioserve.request import MAX_CACHE_SECONDS, SESSION, SLO_CLASS, SLO_TPOT, SLO_TTFT


class Hint(NamedTuple):
    """A field that changes no answer: any value of it is accepted."""

    effect: str = "changes no answer"  # what becomes of it, for the documentation


class Skipped(NamedTuple):
    """Work that only a vendor's servers do: it is passed over, and the log says so."""

    what: str


class Unserved(NamedTuple):
    """A field that is refused unless it asks for nothing."""

    no_ops: tuple[Any, ...] = ()  # besides null, and false unless true is one
    instead: str = ""

    def is_no_op(self, value: Any) -> bool:
        """Return whether this value asks for nothing."""
        if value is None or (value is False and not any(no_op is True for no_op in self.no_ops)):
            return True
        # Types are compared as well: logprobs=0 is not false, echo=1 is not true.
        return any(type(value) is type(no_op) and value == no_op for no_op in self.no_ops)


Rule = Hint | Skipped | Unserved

#: The routes that generate: every row holds for all of them, where it does not name one.
GENERATING = ("completions", "chat", "responses", "messages")


class Field(NamedTuple):
    """The fate of one field where the route does not serve it."""

    rule: Rule | None  # on the routes that generate; None: unknown there
    on: Mapping[str, Rule] = MappingProxyType({})  # by route, where it is another
    is_foreign: bool = False  # --ignore-unknown-fields ignores it


def _field(rule: Rule | None = None, **on: Rule) -> Field:
    return Field(rule, MappingProxyType(on))


def _foreign(*no_ops: Any, instead: str = "") -> Field:
    return Field(Unserved(no_ops, instead), is_foreign=True)


_LABEL = Hint("a label")
_POLICY = Hint("hints for the policy")
_WHERE = Hint("the server decides where and how fast it computes")
_OF_CHAT = Hint("there is no chat template to tell")
_OF_DRAWING = Hint("of beam search, which is not served")

#: Hints for the policy by the names that other servers' clients have for them.
HINT_FIELDS = ("kv_hints", "nvext", "session_id", "vllm_xargs")
_OF_POLICY = {name: _field(_POLICY, embeddings=_POLICY, score=_POLICY) for name in HINT_FIELDS}

_LABELS_AND_HINTS = {
    "access_programs": _field(_LABEL),
    "billing_policy": _field(_LABEL),
    "cache_control": _field(
        Hint("prefixes are cached by themselves; see the hint `cache_seconds`")
    ),
    "client_metadata": _field(_LABEL),
    "container": _field(Hint("of tools that a vendor runs")),
    "context_management": _field(Hint("the client's messages are taken as they are")),
    "diagnostics": _field(Hint("nothing is diagnosed")),
    "fallback_credit_token": _field(_LABEL),
    "fallbacks": _field(Hint("one model answers")),
    "inference_geo": _field(_WHERE),
    "metadata": _field(_POLICY),
    "models": _field(Hint("one model answers")),
    "personality": _field(Unserved(), responses=Hint("of a vendor's models")),
    "prediction": _field(Hint("of speed; see speculative decoding")),
    "prompt_cache_key": _field(Hint("the hint `session`")),
    "prompt_cache_options": _field(_LABEL),
    "prompt_cache_retention": _field(_LABEL),
    "provider": _field(_WHERE),
    "route": _field(_WHERE),
    "safety_identifier": _field(_LABEL),
    "service_tier": _field(Hint("there is one tier")),
    "speed": _field(_WHERE),
    "store": _field(Hint("nothing is stored")),
    "stream_interval": _field(Hint("deltas are sent as they come")),
    "usage": _field(Hint("the usage always comes")),
    "transforms": _field(Hint("what is too long is refused")),
    "verbosity": _field(
        _OF_CHAT,
        responses=Unserved(("medium",), "text.verbosity"),
        messages=Hint("no template looks at it"),
    ),
}
_OF_VENDORS = {
    "mcp_servers": _field(Skipped("MCP servers")),
    "plugins": _field(Skipped("plugins")),
    "web_search_options": _field(Skipped("web search")),
}
_OPENAI = {
    "audio": _field(Unserved()),
    "background": _field(Unserved((), "stream, or wait")),
    "conversation": _field(Unserved((), "previous_response_id on /v1/responses")),
    "function_call": _field(Unserved(("none", "auto"), "tool_choice")),
    "functions": _field(Unserved(([],), "tools")),
    "image": _field(Unserved(), responses=Hint("how a vendor's models read images")),
    "modalities": _field(Unserved((["text"],))),
    "moderation": _field(Unserved()),
    "suffix": _field(Unserved(("",), "/v1/completions")),
}
_ANTHROPIC = {
    "compaction": _field(Unserved((), "a message that asks for a summary")),
    "thread": _field(Unserved((), "all messages: none are kept")),
}
_VLLM = {
    "chat_template": _field(
        Unserved((), "the model's own, with chat_template_kwargs"),
        tokenize=Unserved((), "the model's own, with chat_template_kwargs"),
    ),
    "documents": _field(Unserved(([],))),
    "early_stopping": _field(_OF_DRAWING),
    "ec_transfer_params": _field(Unserved()),
    "enable_response_messages": _field(Unserved()),
    "guided_choice": _field(Unserved((), "structured_outputs.choice")),
    "guided_decoding_backend": _field(Hint("there is one")),
    "guided_grammar": _field(Unserved((), "structured_outputs.grammar")),
    "guided_json": _field(Unserved((), "structured_outputs.json")),
    "guided_regex": _field(Unserved((), "structured_outputs.regex")),
    "guided_whitespace_pattern": _field(Unserved()),
    "kv_transfer_params": _field(Unserved()),
    "length_penalty": _field(_OF_DRAWING),
    "logits_processors": _field(Unserved(([],))),
    "logprob_token_ids": _field(Unserved()),
    "media_io_kwargs": _field(Unserved(({},))),
    "mm_processor_kwargs": _field(
        Unserved(({},)), embeddings=Unserved(({},)), tokenize=Unserved(({},))
    ),
    "previous_input_messages": _field(Unserved(([],), "input on /v1/responses")),
    "prompt_embeds": _field(Unserved()),
    "repetition_detection": _field(Unserved()),
    "return_prompt_text": _field(Unserved()),
    "return_token_offsets": _field(Unserved()),
    "return_tokens_as_token_ids": _field(Unserved()),
    "routed_experts_prompt_start": _field(Unserved((0,))),
    "spaces_between_special_tokens": _field(Unserved((True,))),
    "structural_tag": _field(Unserved((), "structured_outputs.structural_tag")),
    "truncation_side": _field(Unserved(("left",)), embeddings=Unserved(("left",))),
    "use_beam_search": _field(Unserved()),
    "watermarking": _field(Unserved()),
}
_SGLANG = {
    "custom_logit_processor": _field(Unserved()),
    "custom_params": _field(Unserved()),
    "ebnf": _field(Unserved((), "structured_outputs.grammar")),
    "json_schema": _field(Unserved((), "structured_outputs.json")),
    "lora_path": _field(Unserved((), "the adapter's name as model")),
    "no_stop_trim": _field(Unserved((), "include_stop_str_in_output")),
    "regex": _field(Unserved((), "structured_outputs.regex")),
    "return_hidden_states": _field(Unserved()),
    "stop_regex": _field(Unserved()),
    "stream_reasoning": _field(Unserved((True,))),
}

_PROMPT = Unserved((), "/v1/completions")
#: Served on some of the routes that generate, and here for the others.
_ELSEWHERE = {
    "add_generation_prompt": _field(Unserved((True,), "/v1/chat/completions")),
    "add_special_tokens": _field(
        Unserved(),  # the chat template says which there are
        completions=Unserved((True,)),
        embeddings=Unserved((True,)),
    ),
    "best_of": _field(Unserved((1,), "/v1/completions")),
    "chat_template_kwargs": _field(Unserved(({},), "/v1/chat/completions")),
    "continue_final_message": _field(Unserved((), "/v1/chat/completions")),
    "detokenize": _field(Unserved((True,), "/v1/chat/completions")),
    "echo": _field(_PROMPT),
    "include": _field(Hint("of what a vendor's tools find")),
    "include_reasoning": _field(Unserved((True,), "/v1/chat/completions"), completions=_OF_CHAT),
    "input": _field(Unserved((), "/v1/responses")),
    "instructions": _field(Unserved((), "a message with role system")),
    "logprobs": _field(Unserved((0,), "/v1/chat/completions")),
    "max_completion_tokens": _field(Unserved((), "max_tokens")),
    "max_output_tokens": _field(Unserved((), "max_tokens")),
    "max_tokens": _field(Unserved((), "max_output_tokens")),
    "max_tool_calls": _field(Hint("of tools that a vendor runs")),
    "messages": _field(
        Unserved((), "/v1/chat/completions"),
        responses=Unserved((), "input"),
        embeddings=Unserved((), "input"),
    ),
    "n": _field(Unserved((1,), "/v1/chat/completions")),
    "output_config": _field(Unserved(({},), "response_format"), responses=Unserved(({},), "text")),
    "output_format": _field(Unserved((), "response_format"), responses=Unserved((), "text.format")),
    "parallel_tool_calls": _field(
        Unserved((True,), "tool_choice.disable_parallel_tool_use"), completions=_OF_CHAT
    ),
    "previous_response_id": _field(Unserved((), "/v1/responses")),
    "prompt": _field(_PROMPT, responses=Unserved((), "instructions and input")),
    "prompt_logprobs": _field(_PROMPT),
    "reasoning": _field(
        Unserved(({},), "reasoning_effort"), messages=Unserved(({},), "output_config.effort")
    ),
    "reasoning_effort": _field(
        _OF_CHAT,
        responses=Unserved(("none",), "reasoning.effort"),
        messages=Unserved(("none",), "output_config.effort"),
    ),
    "response_format": _field(
        Unserved((), "text.format"), messages=Unserved((), "output_config.format")
    ),
    "return_token_ids": _field(Unserved((), "/v1/chat/completions")),
    "separate_reasoning": _field(Unserved((True,), "/v1/chat/completions"), completions=_OF_CHAT),
    "stream_options": _field(Hint("the usage always comes, and no padding")),
    "thinking_token_budget": _field(
        Unserved((-1,), "/v1/chat/completions"), messages=Unserved((-1,), "thinking.budget_tokens")
    ),
    "text": _field(Unserved(({},), "response_format")),
    "thinking": _field(Unserved((), "reasoning_effort")),
    "tool_choice": _field(Unserved(("none", "auto"), "/v1/chat/completions")),
    "tools": _field(Unserved(([],), "/v1/chat/completions")),
    "top_logprobs": _field(Unserved((0,), "/v1/chat/completions")),
    "truncation": _field(Unserved(("disabled",), "truncate_prompt_tokens")),
}

#: Of llama.cpp, Ollama, TGI and others: unknown here, but it can be said what they are called.
_FOREIGN = {
    "adapter_id": _foreign(instead="the adapter's name as model"),
    "cache_prompt": _foreign(True, False),
    "do_sample": _foreign(True, instead="temperature 0 for false"),
    "dry_multiplier": _foreign(0, 0.0),
    "dynatemp_range": _foreign(0, 0.0),
    "grammar": _foreign("", instead="structured_outputs.grammar"),
    "images": _foreign([]),
    "input_ids": _foreign(instead="prompt on /v1/completions"),
    "lora": _foreign([], instead="the adapter's name as model"),
    "lora_name": _foreign(instead="the adapter's name as model"),
    "max_length": _foreign(instead="max_tokens"),
    "max_new_tokens": _foreign(instead="max_tokens"),
    "min_new_tokens": _foreign(0, instead="min_tokens"),
    "mirostat": _foreign(0),
    "n_predict": _foreign(-1, instead="max_tokens"),
    "n_probs": _foreign(0, instead="logprobs"),
    "num_beams": _foreign(1),
    "num_predict": _foreign(-1, instead="max_tokens"),
    "random_seed": _foreign(instead="seed"),
    "repeat_last_n": _foreign(),
    "repeat_penalty": _foreign(1, 1.0, instead="repetition_penalty"),
    "rid": _foreign(instead="request_id"),
    "stop_sequences": _foreign([], instead="stop"),
    "system": _foreign(instead="a message with role system"),
    "thinking_budget": _foreign(-1, instead="thinking_token_budget"),
    "thinking_budget_tokens": _foreign(-1, instead="thinking_token_budget"),
    "tfs_z": _foreign(1, 1.0),
    "top_a": _foreign(0, 0.0),
    "top_n_tokens": _foreign(0, instead="logprobs"),
    "typical_p": _foreign(1, 1.0),
    "xtc_probability": _foreign(0, 0.0),
}

_OF_OTHER_ROUTES = {
    "activation": _field(score=Unserved()),
    "embed_dtype": _field(embeddings=Unserved(("float32",))),
    "endianness": _field(embeddings=Unserved(("native", "little"))),
    "load_inplace": _field(load_lora_adapter=Unserved((), "/v1/unload_lora_adapter first")),
    "lora_int_id": _field(unload_lora_adapter=Unserved((), "lora_name")),
    "max_chunks_per_doc": _field(score=Unserved((1,))),
    "rank_fields": _field(score=Unserved(([], ["text"]))),
    "softmax": _field(score=Unserved((True,))),
    "use_activation": _field(score=Unserved((True,))),
}

FIELDS: Mapping[str, Field] = {
    **_OF_POLICY,
    **_LABELS_AND_HINTS,
    **_OF_VENDORS,
    **_OPENAI,
    **_ANTHROPIC,
    **_VLLM,
    **_SGLANG,
    **_ELSEWHERE,
    **_FOREIGN,
    **_OF_OTHER_ROUTES,
}
#: What routes call fields that `instead` names as chat does; what they lack, chat has.
_CALLED = {
    ("messages", "thinking_token_budget"): "thinking.budget_tokens",
    ("responses", "max_tokens"): "max_output_tokens",
    ("responses", "response_format"): "text.format",
    ("messages", "response_format"): "output_config.format",
}


def rules_of(route: str, served: Collection[str]) -> dict[str, Rule]:
    """By name: what becomes of the known fields that `route`, which serves `served`, does not."""
    found: dict[str, Rule] = {}
    for name, row in FIELDS.items():
        rule = row.on.get(route, row.rule if route in GENERATING else None)
        if rule is None or name in served:
            continue
        if isinstance(rule, Unserved):
            own = rule.instead.partition(".")[0]
            if own.isidentifier() and own not in served:
                instead = _CALLED.get((route, own), "/v1/chat/completions")
                rule = rule._replace(instead=instead)
        found[name] = rule
    return found


# For how long a client wants a prefix to be kept: the `ttl` of `cache_control`, which Anthropic's
# clients set at many places of a body.


#: Where a `cache_control` stands in a body, names and indices down to it, and its value.
CacheControl = tuple[tuple[str | int, ...], Any]
#: On a request: the seconds that it states, which become the hint `cache_seconds`.
CACHED_FOR = web.RequestKey("CACHED_FOR", float)

_TTL = re.compile(r"([0-9]{1,4})([smh])")
_SECONDS = {"s": 1, "m": 60, "h": 3600}


def note_ttl(request: web.Request, controls: Iterable[CacheControl]) -> None:
    """Note the longest `ttl` among the values of `cache_control` of a body. Without any, prefixes
    are cached as long as there is room. Raises `RequestError` with the place of a wrong one.
    """
    found = [
        _seconds(path, control["ttl"])
        for path, control in controls
        if isinstance(control, dict) and control.get("ttl") is not None
    ]
    if found:
        request[CACHED_FOR] = max(found)


def _seconds(path: tuple[str | int, ...], ttl: object) -> float:
    match = _TTL.fullmatch(ttl) if isinstance(ttl, str) else None
    seconds = 0 if match is None else int(match[1]) * _SECONDS[match[2]]
    if not 0 < seconds <= MAX_CACHE_SECONDS:
        names = (*path, "cache_control", "ttl")
        place = "".join(f"[{n}]" if isinstance(n, int) else f".{n}" for n in names).lstrip(".")
        raise RequestError(
            f"{place} must be a time of at most an hour, such as '5m' or '1h', got {ttl!r:.40}",
            param=place,
        )
    return float(seconds)


# What a request asks for and only a vendor's servers do: it is passed over, and logged once. Knows
# the tools of vendors by their types. Knows no route and no struct.


PASSED_OVER = web.RequestKey("PASSED_OVER", list[str])

#: Types of tools, without their dates, that a vendor runs, or that only a vendor's models know.
VENDORS_TOOLS = frozenset(
    (
        *("advisor", "apply_patch", "bash", "browser_toolset", "code_execution"),
        *("code_interpreter", "computer", "computer_toolset", "computer_use"),
        *("computer_use_preview", "file_search", "google_search", "image_generation"),
        *("local_shell", "mcp", "mcp_toolset", "memory", "programmatic_tool_calling", "shell"),
        *("text_editor", "tool_search", "tool_search_tool_bm25", "tool_search_tool_regex"),
        *("web_fetch", "web_search", "web_search_preview"),
    )
)
_DATED = re.compile(r"(.+?)(_\d{8}|_\d{4}_\d\d_\d\d)?", re.ASCII)


def is_vendors(kind: object) -> bool:
    """Return whether a tool of this type, with a date behind it or not, is one of a vendor's."""
    found = _DATED.fullmatch(kind) if isinstance(kind, str) else None
    return found is not None and found[1] in VENDORS_TOOLS


def pass_over(request: web.Request, what: Iterable[str]) -> None:
    """Note what is not done, in words, for the log."""
    request.setdefault(PASSED_OVER, []).extend(what)


def pass_over_tools(request: web.Request, tools: Sequence[dict[str, Any]] | None) -> None:
    """Note the tools among `tools` that are a vendor's."""
    kinds = (tool.get("type") for tool in tools or ())
    pass_over(request, (f"the tool {kind}" for kind in kinds if is_vendors(kind)))


# Headers and fields that others have for hints; `access.hints` reads them.

#: Headers of routers, gateways and agents, by the hint that each one states; the first that a
#: request has counts. Dynamo's, Claude Code's and Codex's are sessions; those of llm-d and of the
#: gateway API name objectives and flows.
HEADERS: Mapping[str, tuple[str, ...]] = {
    SESSION: (
        *("X-Session-Id", "X-Dynamo-Session-Id", "X-Claude-Code-Session-Id"),
        *("session-id", "session_id"),  # new and old
    ),
    SLO_CLASS: (
        "X-Request-Class",
        "x-gateway-inference-objective",
        "x-llm-d-inference-objective",
    ),
    "fairness_id": ("x-gateway-inference-fairness-id", "x-llm-d-inference-fairness-id"),
}
#: Headers of llm-d in milliseconds, by the hint, in seconds.
HEADERS_IN_MS: Mapping[str, str] = {SLO_TTFT: "x-slo-ttft-ms", SLO_TPOT: "x-slo-tpot-ms"}
#: Fields of bodies that are maps of hints: of vLLM, and of its clients.
MAPS = ("vllm_xargs", "kv_hints")
#: Labels of bodies, by the hint that each one states; the first that a body has counts.
LABELS: Mapping[str, tuple[str, ...]] = {SESSION: ("session_id", "prompt_cache_key")}
