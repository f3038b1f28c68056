"""Bodies to structs: strict decoding, and refusal of known fields that nothing here honours.

Raises `RequestError` with the path of the field. Knows nothing about HTTP or the engine.
"""

import re
from typing import Any, TypeVar

import msgspec

from aioserve.errors import RequestError
from aioserve.server.protocol import GenerationRequest

T = TypeVar("T", bound=GenerationRequest)

# Fields of OpenAI, vLLM and SGLang that are not implemented here, and the values besides null
# and false that ask for nothing. Pure hints and labels (metadata, safety_identifier,
# prompt_cache_key, parallel_tool_calls ...) are not listed: ignoring them changes no answer.
REFUSED_FIELDS: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "audio": (),
    "echo": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM
    "add_generation_prompt": (True,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (),
    "documents": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "return_tokens_as_token_ids": (),
    "spaces_between_special_tokens": (True,),
    "structural_tag": (),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (),
    # SGLang
    "ebnf": (),
    "json_schema": (),
    "lora_path": (),
    "no_stop_trim": (),
    "regex": (),
}

_refused_decoder = msgspec.json.Decoder(
    msgspec.defstruct("RefusedFields", [(name, Any, None) for name in REFUSED_FIELDS])
)

_PATH = re.compile(r" - at `(?:key` in `)?\$\.?([^`]*)`")
_MISSING = re.compile(r"missing required field `([^`]+)`")


def decode_request(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """The request in `body`. Raises `RequestError` that names the path of what is wrong."""
    try:
        request = decoder.decode(body)
        refused = _refused_decoder.decode(body)
    except msgspec.ValidationError as error:
        raise RequestError(str(error), param=_path(str(error))) from error
    except (ValueError, RecursionError) as error:  # malformed, not UTF-8, nested too deep
        raise RequestError(f"the body is not valid JSON: {error}") from error
    _refuse(refused)
    if request.stream_options is not None and not request.stream:
        raise RequestError(
            "stream_options is only allowed when stream is true", param="stream_options"
        )
    return request


def _refuse(fields: Any) -> None:
    for name, harmless in REFUSED_FIELDS.items():
        value = getattr(fields, name)
        if value is None or value is False:
            continue
        # Types are compared as well: prompt_logprobs=0 is not false, echo=1 is not true.
        if not any(type(value) is type(other) and value == other for other in harmless):
            raise RequestError(f"{name} is not supported by this server", param=name)


def _path(message: str) -> str | None:
    """`messages[0].role` out of msgspec's message, or None if the whole body is wrong."""
    found = _PATH.search(message)
    parent = found.group(1) if found else ""
    if missing := _MISSING.search(message):
        return f"{parent}.{missing.group(1)}" if parent else missing.group(1)
    return parent or None
