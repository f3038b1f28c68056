"""What not every model or request needs: each folder is one feature, loaded when asked for."""

from collections.abc import Mapping
from typing import Any

_FORMATS = "aioserve.features.formats"

BRINGS: Mapping[str, Mapping[Any, str]] = {
    # LoRA adapters on models: `runner.adapters`.
    "adapters": {
        "loaded": "aioserve.features.lora.rows:LoadedLowRank",
        "hooks": "aioserve.features.lora.products:HookedAdapters",
        "decoder": "aioserve.features.lora.cpu_products:CompiledAdapters",
    },
    # What the batch of a runner keeps of its rows: `runner.load_plan`.
    "batch parts": {
        "adapters": "aioserve.features.lora.rows:AdapterRows",
        "states": "aioserve.features.states.rows:StateRows",
        "windows": "aioserve.features.states.rows:WindowRows",
        "grammars": "aioserve.features.grammars.rows:GrammarRows",
        "thinking": "aioserve.features.grammars.thinking:ThinkingRows",
    },
    # What compiles structured outputs: `runner.interface`.
    "output compilers": {"llguidance": "aioserve.features.grammars.compiler:GrammarCompiler"},
    # What engines load for their settings: `engine.builder`, `.async_engine` and `.metrics`.
    "engine": {
        "KV connector": "aioserve.features.kv_connector.engine_side:make_connector",
        "KV connector check": "aioserve.features.kv_connector.engine_side:check_connector",
        "KV connector metrics": "aioserve.features.kv_connector.engine_side:KVConnectorMetrics",
        "adapter files": "aioserve.features.lora.peft_directory:read_adapter",
        "held ends": "aioserve.features.kv_connector.engine_side:HeldBack",
    },
    # What guesses tokens: `runner.batch.drafter`.
    "drafters": {
        "length": "aioserve.features.spec_decode.draft_length:DraftLength",
        "ngram": "aioserve.features.spec_decode.ngram:ngram_drafter",
        "find": "aioserve.features.spec_decode.drafts:find_draft",
        "load": "aioserve.features.spec_decode.drafts:load_draft",
        "cpu passes": "aioserve.features.spec_decode.cpu_passes:CpuDraftRunner",
    },
    # What keeps KV blocks for a connector, by the runner: `runner.cpu.executor`, `.simulated`.
    "kv copies": {
        "cpu": "aioserve.features.kv_connector.cpu_copies:HostCopies",
        "simulated": "aioserve.features.kv_connector.simulated:SimulatedBlocks",
        "simulated directory": "aioserve.features.kv_connector.simulated:SimulatedDirectory",
    },
    # What loads models with more than attention over tokens: `runner.loader`.
    "parts of models": {
        "states": "aioserve.features.states.layers:StatefulLayers",
        "text and encoder": "aioserve.features.multimodal.vision_language:load_parts",
        "sees": "aioserve.features.multimodal.image_encoder:sees_images",
        "encoder bytes": "aioserve.features.multimodal.image_encoder:encoder_cache_bytes",
    },
    "states on a cpu": {
        "steps": "aioserve.features.states.cpu_steps:with_own_steps",
        "memory": "aioserve.features.states.cpu_memory:with_states_and_windows",
    },
    # Resources of the scheduler's side, by the names of their plans: `kv_cache.resource`.
    "caches": {
        "adapters": "aioserve.features.lora:AdapterSlots",
        "states": "aioserve.features.states.slots:StateSlotPool",
        "windows": "aioserve.features.states.windows:WindowBlockPool",
        "encoder": "aioserve.features.multimodal.encoder_cache:EncoderOutputs",
    },
    # Models on disk that are no plain directories: `model_source.source`.
    "model sources": {
        "gguf": "aioserve.features.gguf:GgufFile",
        "quantized directory": "aioserve.features.quantized.directory:QuantizedDirectory",
    },
    # What reads images and videos of bodies, what brings them to the engine, and what reads prompts
    # that have some.
    "media": {
        "parts": "aioserve.features.multimodal.bodies:BodyMedia",
        "loader": "aioserve.features.multimodal.bodies:ImageLoader",
        "prompts": "aioserve.features.multimodal.prompt:MultimodalProcessor",
        "memory": "aioserve.features.multimodal.encoder_cache:ImageMemory",
    },
    # What is known of JSON schemas by what compiles them.
    "grammars": {"schemas": "aioserve.features.grammars.schema"},
    # Ways in which models write calls and reasoning: by name, and by texts of which a chat template
    # has one where its model writes so. That of plain JSON is never shown.
    "reply formats": {
        ("harmony", "<|channel|>"): f"{_FORMATS}.harmony:HarmonyParser",
        ("gemma4", "<|tool_call>"): f"{_FORMATS}.noted_calls:Gemma4Parser",
        (
            "lfm2",
            "<|tool_call_start|>",
            "<|tool_list_start|>",
            "List of tools: [",
        ): f"{_FORMATS}.noted_calls:Lfm2Parser",
        ("olmo3", "<function_calls>"): f"{_FORMATS}.noted_calls:Olmo3Parser",
        ("llama4_pythonic", "[func_name1("): f"{_FORMATS}.noted_calls:Llama4PythonicParser",
        ("llama4_json", "<|header_start|>"): f"{_FORMATS}.json_formats:Llama4JsonParser",
        (
            "deepseek_v3",
            "<\uff5ctool\u2581calls\u2581begin\uff5c>",
        ): f"{_FORMATS}.call_block:DeepSeekV3Parser",
        (
            "deepseek_v31",
            "<\uff5ctool\u2581calls\u2581begin\uff5c>",
        ): f"{_FORMATS}.call_block:DeepSeekV31Parser",
        ("nemotron", "<TOOLCALL>"): f"{_FORMATS}.json_formats:NemotronParser",
        ("apriel", "<tool_calls>["): f"{_FORMATS}.json_formats:AprielParser",
        (
            "phi4_mini",
            "<|/tool_call|>",
            "<|/tool|>",
            "functools[",
        ): f"{_FORMATS}.json_formats:Phi4Parser",
        ("granite", "<|tool_call|>"): f"{_FORMATS}.json_formats:GraniteParser",
        ("mistral", "[TOOL_CALLS]"): f"{_FORMATS}.json_formats:MistralParser",
        ("deepseek_v32", "\uff5cDSML\uff5c"): f"{_FORMATS}.tagged:DeepSeekV32Parser",
        ("deepseek_v4", "\uff5cDSML\uff5c"): f"{_FORMATS}.tagged:DeepSeekV4Parser",
        ("kimi_k2", "<|tool_calls_section_begin|>"): f"{_FORMATS}.call_block:KimiK2Parser",
        ("minimax_m2", "<minimax:tool_call>"): f"{_FORMATS}.tagged:MiniMaxM2Parser",
        ("seed_oss", "<seed:tool_call>"): f"{_FORMATS}.tagged:SeedOssParser",
        ("glm47", "<arg_key>"): f"{_FORMATS}.tagged:Glm47Parser",
        ("glm", "<arg_key>"): f"{_FORMATS}.tagged:GlmParser",
        ("qwen3_coder", "<function="): f"{_FORMATS}.tagged:Qwen3CoderParser",
        ("hermes", "<tool_call>"): f"{_FORMATS}.json_formats:HermesParser",
        (
            "llama3_json",
            "<|python_tag|>",
            "<|start_header_id|>",
        ): f"{_FORMATS}.json_formats:Llama3Parser",
        ("json",): f"{_FORMATS}.json_formats:PlainJsonParser",
    },
}
