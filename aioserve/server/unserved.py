"""Fields that clients know from OpenAI or other engines and that are not served here, as data.

Each says which of its values ask for nothing, and what to send instead. Knows nothing about how
bodies are decoded.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Unserved(NamedTuple):
    """A field that is refused unless it asks for nothing."""

    no_ops: tuple[Any, ...] = ()  # besides null, and false unless true is one
    instead: str = ""

    def is_no_op(self, value: Any) -> bool:
        """Whether this value asks for nothing."""
        if value is None or (value is False and not any(no_op is True for no_op in self.no_ops)):
            return True
        # Types are compared as well: logprobs=0 is not false, echo=1 is not true.
        return any(type(value) is type(no_op) and value == no_op for no_op in self.no_ops)


#: Hints for the policy by the names that other servers' clients have for them.
HINT_FIELDS = ("kv_hints", "nvext", "session_id", "vllm_xargs")
#: Labels and hints: whatever they say, the answer is the same.
HINTS = (
    *("metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    *("safety_identifier", *HINT_FIELDS),
)

_OPENAI = {
    "audio": Unserved(),
    "function_call": Unserved(("none", "auto")),
    "functions": Unserved(([],)),
    "modalities": Unserved((["text"],)),
    "moderation": Unserved(),
    "prediction": Unserved(),
    "service_tier": Unserved(("auto", "default")),
    "store": Unserved(),
    "suffix": Unserved(("",), "a prompt with the model's own tokens for infilling, if it has any"),
    "verbosity": Unserved(("medium",)),
    "web_search_options": Unserved(),
}
_VLLM = {
    "chat_template": Unserved((), "the model's own, with chat_template_kwargs"),
    "documents": Unserved(([],)),
    "early_stopping": Unserved(),
    "ec_transfer_params": Unserved(),
    "guided_choice": Unserved((), "structured_outputs.choice"),
    "guided_decoding_backend": Unserved(),
    "guided_grammar": Unserved((), "structured_outputs.grammar"),
    "guided_json": Unserved((), "structured_outputs.json"),
    "guided_regex": Unserved((), "structured_outputs.regex"),
    "guided_whitespace_pattern": Unserved(),
    "kv_transfer_params": Unserved(),
    "length_penalty": Unserved((1, 1.0)),
    "logits_processors": Unserved(([],)),
    "logprob_token_ids": Unserved(),
    "media_io_kwargs": Unserved(({},)),
    "mm_processor_kwargs": Unserved(({},)),
    "prompt_embeds": Unserved(),
    "repetition_detection": Unserved(),
    "return_prompt_text": Unserved(),
    "return_token_offsets": Unserved(),
    "return_tokens_as_token_ids": Unserved(),
    "routed_experts_prompt_start": Unserved((0,)),
    "spaces_between_special_tokens": Unserved((True,)),
    "stream_interval": Unserved((1,)),
    "structural_tag": Unserved((), "structured_outputs.structural_tag"),
    "truncation_side": Unserved(("left",)),
    "use_beam_search": Unserved(),
    "watermarking": Unserved(),
}
_SGLANG = {
    "custom_logit_processor": Unserved(),
    "custom_params": Unserved(),
    "ebnf": Unserved((), "structured_outputs.grammar"),
    "json_schema": Unserved((), "structured_outputs.json"),
    "lora_path": Unserved((), "the adapter's name as model"),
    "no_stop_trim": Unserved(),
    "regex": Unserved((), "structured_outputs.regex"),
    "return_hidden_states": Unserved(),
    "stop_regex": Unserved(),
    "stream_reasoning": Unserved((True,)),
}
#: Of OpenAI, vLLM and SGLang, whose clients come here as they are: never ignored.
UNSERVED: Mapping[str, Unserved] = _OPENAI | _VLLM | _SGLANG

#: Of llama.cpp, Ollama, TGI and others: unknown here, but it can be said what they are called.
FOREIGN: Mapping[str, Unserved] = {
    "adapter_id": Unserved((), "the adapter's name as model"),
    "cache_prompt": Unserved((True, False)),
    "do_sample": Unserved((True,), "temperature 0 for false"),
    "dry_multiplier": Unserved((0, 0.0)),
    "dynatemp_range": Unserved((0, 0.0)),
    "grammar": Unserved(("",), "structured_outputs.grammar"),
    "images": Unserved(([],)),
    "input_ids": Unserved((), "prompt on /v1/completions"),
    "lora": Unserved(([],), "the adapter's name as model"),
    "lora_name": Unserved((), "the adapter's name as model"),
    "max_length": Unserved((), "max_tokens"),
    "max_new_tokens": Unserved((), "max_tokens"),
    "min_new_tokens": Unserved((0,), "min_tokens"),
    "mirostat": Unserved((0,)),
    "n_predict": Unserved((-1,), "max_tokens"),
    "n_probs": Unserved((0,), "logprobs"),
    "num_beams": Unserved((1,)),
    "num_predict": Unserved((-1,), "max_tokens"),
    "random_seed": Unserved((), "seed"),
    "repeat_last_n": Unserved(),
    "repeat_penalty": Unserved((1, 1.0), "repetition_penalty"),
    "rid": Unserved((), "request_id"),
    "stop_sequences": Unserved(([],), "stop"),
    "system": Unserved((), "a message with role system"),
    "thinking_budget": Unserved((-1,), "thinking_token_budget"),
    "thinking_budget_tokens": Unserved((-1,), "thinking_token_budget"),
    "tfs_z": Unserved((1, 1.0)),
    "top_a": Unserved((0, 0.0)),
    "top_n_tokens": Unserved((0,), "logprobs"),
    "typical_p": Unserved((1, 1.0)),
    "xtc_probability": Unserved((0, 0.0)),
}

#: Served on the other endpoint, or under another name.
NOT_ON_COMPLETIONS: Mapping[str, Unserved] = {
    "add_generation_prompt": Unserved((True,)),
    "add_special_tokens": Unserved((True,)),
    "chat_template_kwargs": Unserved(({},), "/v1/chat/completions"),
    "continue_final_message": Unserved((), "/v1/chat/completions"),
    "include_reasoning": Unserved((True, False)),
    "max_completion_tokens": Unserved((), "max_tokens"),
    "messages": Unserved((), "/v1/chat/completions"),
    "parallel_tool_calls": Unserved((True, False)),
    "reasoning_effort": Unserved(("none",), "/v1/chat/completions"),
    "separate_reasoning": Unserved((True, False)),
    "thinking_token_budget": Unserved((-1,), "/v1/chat/completions"),
    "tool_choice": Unserved(("none", "auto"), "/v1/chat/completions"),
    "tools": Unserved(([],), "/v1/chat/completions"),
    "top_logprobs": Unserved((0,), "logprobs, a number"),
}
NOT_ON_CHAT: Mapping[str, Unserved] = {
    "add_special_tokens": Unserved(),  # the chat template says which there are
    "best_of": Unserved((1,)),
    "echo": Unserved(),
    "prompt": Unserved((), "/v1/completions"),
}

# Of Anthropic's routes.

#: Labels and hints: prefixes are cached without being told.
HINTS_ON_MESSAGES = ("cache_control", *HINT_FIELDS)
#: What neither of them serves.
UNSERVED_ANTHROPIC: Mapping[str, Unserved] = {
    "context_management": Unserved(({},)),
    "mcp_servers": Unserved(([],)),
    "output_format": Unserved((), "output_config.format"),
    "speed": Unserved(("standard",)),
}
NOT_ON_MESSAGES: Mapping[str, Unserved] = {
    "container": Unserved(),
    "diagnostics": Unserved(),
    "inference_geo": Unserved(("global",)),
    "max_completion_tokens": Unserved((), "max_tokens"),
    "service_tier": Unserved(("auto", "standard_only")),
    "stop": Unserved((), "stop_sequences"),
    "user": Unserved((), "metadata.user_id"),
}

# Of /v1/responses.

#: Labels and hints: whatever they say, the answer is the same.
HINTS_ON_RESPONSES = tuple(name for name in HINTS if name != "metadata")
NOT_ON_RESPONSES: Mapping[str, Unserved] = {
    "access_programs": Unserved(),
    "background": Unserved((), "stream, or wait"),
    "context_management": Unserved(([],)),
    "conversation": Unserved((), "previous_response_id"),
    "image": Unserved(),
    "moderation": Unserved(),
    "prompt": Unserved((), "instructions and input"),
    "service_tier": Unserved(("auto", "default")),
    "stream_options": Unserved(({}, {"include_obfuscation": False})),
    "top_logprobs": Unserved((0,)),
    "truncation": Unserved(("disabled",)),
    "max_tokens": Unserved((), "max_output_tokens"),
    "messages": Unserved((), "input"),
}

# Of the routes of adapters, from vLLM.

NOT_ON_LOAD_ADAPTER: Mapping[str, Unserved] = {
    "load_inplace": Unserved((), "/v1/unload_lora_adapter first"),
}
NOT_ON_UNLOAD_ADAPTER: Mapping[str, Unserved] = {
    "lora_int_id": Unserved((), "lora_name"),
}

#: Of /v1/embeddings, from vLLM.
NOT_ON_EMBEDDINGS: Mapping[str, Unserved] = {
    "add_special_tokens": Unserved((True,)),
    "embed_dtype": Unserved(("float32",)),
    "endianness": Unserved(("native", "little")),
    "messages": Unserved((), "input"),
    "mm_processor_kwargs": Unserved(({},)),
    "truncation_side": Unserved(("left",)),
}
