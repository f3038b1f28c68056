"""The cards of the models that are served: what the engine and the format of replies can do.

Knows which fields of chat depend on that. Knows nothing about HTTP.
"""

import msgspec

from aioserve.engine import EngineClient
from aioserve.server.chat.chat_format import ChatFormat
from aioserve.server.model_card import Architecture, Capability, ModelCard

#: Fields of chat that each model serves, by OpenRouter's names.
_SAMPLING = (
    *("frequency_penalty", "logit_bias", "logprobs", "max_completion_tokens", "max_tokens"),
    *("min_p", "presence_penalty", "repetition_penalty", "seed", "stop", "temperature"),
    *("top_k", "top_logprobs", "top_p"),
)
_STRUCTURED = ("response_format", "structured_outputs")
_TOOLS = ("parallel_tool_calls", "tool_choice", "tools")
_REASONING = ("include_reasoning", "reasoning_effort")


def model_cards(engine: EngineClient, chat_format: ChatFormat | None) -> list[ModelCard]:
    """A card of each name of the model, then one of each adapter; no `chat_format`: no chat."""
    model, longest = engine.config.model, engine.max_model_len
    sees = not engine.refuses_images
    inputs = ("text", *(("image",) if sees else ()))
    inputs += () if engine.media.refuses_videos else ("video",)
    calls = chat_format is not None and chat_format.takes_tools
    thinks = chat_format is not None and chat_format.tells_apart
    capabilities: dict[Capability, bool] = {
        "completion": True,
        "embedding": engine.supports_embeddings,
        "vision": sees,
        "tools": calls,
        "thinking": thinks,
    }
    # The grammars of a reply are masks of logits, which a simulated runner does not have.
    is_bound = engine.config.runner.runner == "model" and bool(engine.model_info.eos_token_ids)
    parameters = [*_SAMPLING, *(_STRUCTURED if is_bound else ())]
    parameters += [*(_TOOLS if calls else ()), *(_REASONING if thinks else ())]
    if chat_format is not None and chat_format.thinking is not None and is_bound:
        parameters.append("thinking_token_budget")
    base = ModelCard(
        id=model.served_name,
        created=engine.started_at,
        max_model_len=longest,
        context_length=longest,
        root=model.model,
        sampling=engine.sampling_defaults,
        architecture=Architecture(modality=f"{'+'.join(inputs)}->text", input_modalities=inputs),
        capabilities=[name for name, has in capabilities.items() if has],
        supported_parameters=sorted(parameters),
    )
    change = msgspec.structs.replace
    return [change(base, id=name) for name in model.served_names] + [
        change(base, id=name, root=str(path), parent=base.id)
        for name, path in engine.adapters.paths.items()
    ]
