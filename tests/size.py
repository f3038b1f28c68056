"""Lines per folder, and how many of them are the core: `make size`.

The core is what must be known to follow a request for text, on a CPU, from the socket to the model
and back. Its limit only falls: what a new feature needs there, another change takes away. Parts are
what a feature owns; they have no limit. Counts every line of Python, C, JavaScript, CSS and HTML.
"""

import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]

#: Lines of the core. Lower it with every change that takes lines away.
CORE_LIMIT = 25_568

#: Folders and files that a feature owns, below `aioserve`; so are `policies/zoo` and
#: `policies/composed`.
PARTS = (
    *("child", "console", "decision_log", "kv_connector", "lab", "multimodal", "ray", "routing"),
    *("autoscalers", "routers", "option_struct.py", "installed.py"),
    *("config/batches.py", "server/batches"),
    *("config/adapters.py", "config/images.py", "config/shadow.py", "config/simulation.py"),
    *(
        "config/speculation.py",
        "testing",
        "workers",
        "client.py",
        "client_batches.py",
        "client_connection.py",
        "client_scoring.py",
    ),
    *("row_values.py", "runner/cpu/row_values.py", "scheduler/row_reading.py"),
    *("pooling_params.py", "hints.py", "grammars/structural_tag.py"),
    *("model_source/adapter.py", "model_source/checkpoint*.py", "model_source/gguf_*.py"),
    *(
        "model_source/quant*.py",
        "model_source/sentence_pooling.py",
        "kv_cache/connector.py",
        "kv_cache/encoder_cache.py",
        "kv_cache/encoding_ahead.py",
        "scheduler/encoder_limits.py",
    ),
    "runner/models/long_rope.py",
    *("kv_cache/events.py", "kv_cache/resources/adapters.py", "kv_cache/resources/encoder.py"),
    *("kv_cache/resources/loads.py", "kv_cache/resources/states.py"),
    *(
        "kv_cache/resources/windows.py",
        "kv_cache/vacancy.py",
        "scheduler/multi_step_decode.py",
        "scheduler/drafts.py",
        "scheduler/draft_lengths.py",
        "scheduler/hearing.py",
        "scheduler/length_history.py",
        "scheduler/length_prediction.py",
    ),
    *(
        "scheduler/bounded_step.py",
        "scheduler/gauges.py",
        "scheduler/wake_up.py",
        "engine/observe/policy_gauges.py",
        "scheduler/lease_verbs.py",
        "scheduler/memory.py",
        "scheduler/offloading.py",
        "scheduler/pausing.py",
        "scheduler/sleeping.py",
        "scheduler/victims.py",
        "scheduler/rejecting.py",
        "scheduler/rejection.py",
        "scheduler/reordering.py",
        "scheduler/retention_verbs.py",
        "scheduler/recompute_price.py",
        "kv_cache/leases.py",
        "kv_cache/offload.py",
        "kv_cache/ranking.py",
        "kv_cache/retention.py",
        "named_module.py",
        "server/fields.py",
        "server/passed_over.py",
        "server/response_format.py",
        "engine/admission/late_system.py",
        "nearest.py",
        "output_file.py",
        "whole.py",
        "zoo.py",
        "progress.py",
        "scheduler/descriptions.py",
        "scheduler/hinted.py",
        "config/policy_files.py",
        "scheduler/option_fields.py",
        "scheduler/part_loader.py",
        "scheduler/parts.py",
        "scheduler/options.py",
        "scheduler/peak_memory.py",
        "scheduler/pooling.py",
    ),
    "scheduler/recompute.py",
    *("scheduler/succession.py", "engine/control", "engine/kv_connector.py", "engine/snapshot.py"),
    *("engine/admission/image_memory.py", "engine/admission/multimodal_prompts.py"),
    *("engine/admission/pooling_validator.py", "engine/delivery/request_log.py"),
    "engine/delivery/tracing.py",
    *("engine/observe/adapter_metrics.py", "engine/observe/feed_observer.py"),
    *("engine/observe/frames.py", "engine/observe/kv_events.py", "engine/observe/live_feed.py"),
    *("engine/observe/*shadow*.py", "engine/observe/shown_id.py", "engine/observe/stacks.py"),
    *("engine/observe/timeline.py", "engine/observe/vllm_names.py", "engine/operated_engine.py"),
    *("engine/observe/watchdog.py", "runner/host_blocks.py", "runner/low_rank.py", "runner/lora"),
    *("runner/multimodal", "runner/profile*", "runner/simulation", "runner/spec_decode"),
    *("runner/batch/pooling.py", "runner/batch/prompt_logprobs.py", "runner/batch/state_rows.py"),
    *("runner/batch/window_rows.py", "runner/models/hooked_adapters.py"),
    *(
        "runner/models/piece_states.py",
        "runner/models/stateful_layers.py",
        "runner/models/own_experts.py",
        "runner/models/own_products.py",
        "runner/models/quantized_load.py",
        "runner/models/tapped_layers.py",
        *("runner/cpu/state_steps.py", "runner/cpu/state_tensors.py", "runner/cpu/conv_steps.py"),
        *("runner/cpu/delta_steps.py", "runner/cpu/mamba_steps.py", "runner/cpu/gated_norms.py"),
        "kernels/sources.py",
        *("kernels/state_steps.py", "kernels/src/any_element.h", "kernels/src/causal_conv.h"),
        *("kernels/src/gated_delta.h", "kernels/src/gated_norm.h"),
        *("kernels/src/selective_scan.h", "kernels/src/state_space.h"),
        "kernels/src/states.h",
        "runner/cuda",
        "runner/tensor_parallel",
    ),
    *(
        "runner/cpu/blocks.py",
        "runner/cpu/drafts.py",
        "runner/cpu/experts.py",
        "runner/cpu/host_copies.py",
    ),
    "runner/cpu/huge_pages.py",
    *(
        "runner/attention/image_ends.py",
        "runner/cpu/int8_cache.py",
        "runner/cpu/encoder_attention.py",
        "runner/cpu/low_rank.py",
    ),
    *(
        "runner/cpu/prepared.py",
        "runner/cpu/prompts.py",
        "runner/cpu/following_rank.py",
        "runner/cpu/rank.py",
        "runner/cpu/sharded_runner.py",
    ),
    *(
        "runner/cpu/resident.py",
        "runner/cpu/sleeper.py",
        "runner/cpu/states.py",
        "runner/cpu/windows.py",
    ),
    *("runner/fused/adapters.py", "runner/fused/experts.py", "runner/fused/shares.py"),
    *("operations/adapters.py", "operations/control.py", "operations/policy.py"),
    *("operations/upkeep.py", "server/admin.py", "server/anthropic", "server/embeddings.py"),
    "server/hints.py",
    *("server/image*.py", "server/videos.py", "server/chat/shown_parts.py"),
    *("server/operators.py", "server/page", "server/responses"),
    *("server/openapi.py", "server/service_manager.py", "server/tokenization.py"),
    # Structured output.
    *("grammars", "structured_outputs.py", "finite_schema.py", "runner/batch/grammar_rows.py"),
    # Tool calls and reasoning: what models write, read.
    *(
        "formats",
        "engine/admission/call_forms.py",
        "server/chat/chat_format.py",
        "server/chat/malformed_calls.py",
        "server/chat/tool_use.py",
        "server/chat/tool_structs.py",
        "server/chat/binding.py",
    ),
    *("server/chat/reply_reader.py", "server/chat/schema_check.py"),
    # Thinking budgets, and reasoning tokens counted.
    *("thinking_budget.py", "reasoning_tokens.py", "token_bytes.py", "server/chat/thinking.py"),
    *("runner/batch/thinking_rows.py", "engine/admission/budget_validator.py"),
    *("server/scoring", "config/scoring.py", "server/model_card*.py"),
    # Keys, accounts, origins, TLS: a server without keys on loopback asks none of them.
    *("server/access/access.py", "server/access/accounts.py", "server/access/exposure.py"),
    *("server/access/hosts.py", "server/access/keyring.py", "server/access/origins.py"),
    *("server/access/site.py", "server/access/tls.py", "config/access.py", "server/keys.py"),
    # Logprobs; models from a hub; rows that fail alone.
    *("server/logprob*.py", "runner/cpu/logprobs.py"),
    *("model_source/downloads.py", "runner/batch/rescue.py", "runner/batch/lost_rows.py"),
    *("scheduler/blame.py", "runner/cpu/each_row.py", "runner/unsound.py"),
    # Kernels of adapters and of experts.
    *("kernels/src/block_pairs.h", "kernels/src/code_pairs.h"),
    *("kernels/src/low_rank.h", "kernels/src/experts.h"),
    "kernels/src/places.h",  # the KV cache read ahead
    # Quantization at load; activations quantized to int8.
    *("config/quantization.py", "runner/cpu/int8_activations.py"),
    *("kernels/src/int8_*.h", "kernels/src/linear_int8.h"),
)
#: Policies that are chosen by name; the default and the plainest are of the core.
CHOSEN_POLICIES = (
    *("deadline", "fair", "hrrn", "latency_budget", "mlfq", "prefix_aged", "priority"),
)
SUFFIXES = {".py", ".c", ".h", ".js", ".css", ".html"}


def _lines(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


def measure() -> dict[str, list[int]]:
    """By folder, each package of `aioserve` apart: files, lines, and lines of these in the core."""
    package = ROOT / "aioserve"
    parts: set[Path] = set()
    for name in PARTS:
        found = list(package.glob(name))
        assert found, f"{name} is in PARTS and not in aioserve"
        parts.update(*({path, *path.rglob("*")} for path in found))
    parts.update(ROOT / f"policies/{name}.py" for name in CHOSEN_POLICIES)
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for top in ("aioserve", "policies", "benchmarks", "tests"):
        for path in sorted((ROOT / top).rglob("*")):
            if path.suffix not in SUFFIXES:
                continue
            names = path.relative_to(ROOT).parts
            folder = "/".join(names[: 2 if top == "aioserve" and len(names) > 2 else 1])
            lines = _lines(path)
            is_core = top in ("aioserve", "policies") and path not in parts
            is_core = is_core and names[1] not in ("composed", "zoo")
            for i, count in enumerate((1, lines, lines * is_core)):
                counts[folder][i] += count
    return counts


def main() -> int:
    """Print the table. Returns 1 if the core is over its limit, else 0."""
    counts = measure()
    print(f"{'folder':24} {'files':>5} {'lines':>7} {'core':>7}")
    for folder, (files, lines, core) in counts.items():
        print(f"{folder:24} {files:5} {lines:7,}" + (f" {core:7,}" if core else ""))
    files, lines, core = map(sum, zip(*counts.values(), strict=True))
    print(f"{'in all':24} {files:5} {lines:7,} {core:7,}, limit {CORE_LIMIT:,}")
    if core > CORE_LIMIT:
        print(
            f"the core has {core:,} lines, its limit is {CORE_LIMIT:,}: take as many away, or put "
            "what one feature owns into files of its own, in PARTS of tests/size.py",
            file=sys.stderr,
        )
    return core > CORE_LIMIT


if __name__ == "__main__":
    sys.exit(main())
