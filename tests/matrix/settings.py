"""What each feature of the matrix is in an engine's settings and in a request's parameters."""

from collections.abc import Collection
from typing import Any

from aioserve import EngineConfig, PoolingParams, SamplingParams
from aioserve.config import (
    AdapterConfig,
    CacheConfig,
    ModelConfig,
    RunnerConfig,
    SchedulerConfig,
    ShadowConfig,
    SpeculationConfig,
)
from aioserve.params import StructuredOutputs
from tests.matrix import asks
from tests.matrix.asks import (
    GRAMMAR,
    MARKED,
    NUM_LOGPROBS,
    NUM_PROMPT_LOGPROBS,
    TEXTS,
    TOOLS,
    Ask,
)
from tests.matrix.built import Builds, BuiltModel, model_key
from tests.matrix.features import FIELDS
from tests.matrix.policy import MatrixPolicy
from tests.processes import COMPUTING_SECONDS

BLOCK = 8  # tokens
MAX_LEN = 240
NUM_BLOCKS = 30  # so few that requests are preempted
NUM_TOKENS = 12
MANY_TOKENS = 32  # with which four prompts that fit outgrow the pool
POLICY = f"{MatrixPolicy.__module__}:{MatrixPolicy.__name__}"
CARD = "CUDA stand-ins"
PLACES = ("one process", "2 ranks", "workers", CARD)


def policy_options(features: Collection[str]) -> dict[str, Any]:
    """The options of `MatrixPolicy`."""
    return {
        "chunk_size": 16 if "chunked prefill" in features else 256,
        "pauses": "pauses" in features,
        "pins": "leases" in features,
    }


def make_config(
    features: Collection[str], builds: Builds, place: str, model: BuiltModel | None = None
) -> EngineConfig:
    """The settings of an engine that has these features, on a model of theirs or another one."""
    model = model or builds.model(features)
    on_card, is_shared, asked = place == CARD, place == "2 ranks", set(features)
    log = None
    if "decision log" in features:
        log = str(builds.new_folder("log") / "decisions")
    return EngineConfig(
        model=ModelConfig(
            model=str(model.path),
            dtype="float32",
            max_model_len=MAX_LEN,
            quantization="int8" if {"few-bit weights", "int8 activations"} & asked else None,
            activations="int8" if "int8 activations" in features else None,
        ),
        cache=_cache(features, builds, "fp8" if on_card else "int8"),
        runner=RunnerConfig(
            threads=None if on_card else 2 if is_shared else 1,
            tensor_parallel_size=2 if is_shared else 1,
            rank_timeout=COMPUTING_SECONDS if is_shared else RunnerConfig().rank_timeout,
        ),
        scheduler=SchedulerConfig(
            policy=POLICY,
            options=policy_options(features),
            max_num_seqs=4,
            pipeline_depth=2 if "depth 2" in features else 1,
            decision_log=log,
        ),
        shadow=ShadowConfig(shadow_policy="fcfs") if "shadow" in features else ShadowConfig(),
        speculation=_speculation(features, model),
        adapters=AdapterConfig(lora=(f"wide={model.adapter}",))
        if "adapters" in features
        else AdapterConfig(),
    )


def _cache(features: Collection[str], builds: Builds, small: str) -> CacheConfig:
    own: dict[str, Any] = {}
    if "states" in features:
        own["num_state_slots"] = 12
    if "windows" in features:
        own["num_window_blocks"] = 140
    if "int8 cache" in features:
        own["kv_cache_dtype"] = small
    if "connector, memory" in features:
        own |= {"kv_connector": "memory", "kv_connector_gib": 0.002}
    if "connector, directory" in features:
        folder = builds.new_folder("blocks")
        own |= {"kv_connector": "disk", "kv_connector_path": str(folder)}
        own |= {"kv_connector_gib": 0.01, "kv_connector_disk_gib": 0.01}
    finds = {"prefix cache", "connector, memory", "connector, directory", "leases"}
    return CacheConfig(
        num_kv_blocks=NUM_BLOCKS,
        block_size=BLOCK,
        watermark=0,
        enable_prefix_caching=bool(finds & set(features)),
        **own,
    )


def _speculation(features: Collection[str], model: BuiltModel) -> SpeculationConfig:
    if "n-gram drafts" in features:
        return SpeculationConfig(speculative_method="ngram", num_speculative_tokens=3)
    named = {"draft model": lambda: model.draft, "EAGLE": lambda: model.head}
    for feature, find in named.items():
        if feature in features:
            return SpeculationConfig(
                speculative_method="draft", draft_model=str(find()), num_speculative_tokens=3
            )
    if "MTP" in features:
        return SpeculationConfig(speculative_method="mtp", num_speculative_tokens=3)
    return SpeculationConfig(speculative_method="none")


def make_params(ask: Ask) -> SamplingParams | PoolingParams:
    """The parameters of a request."""
    if "embeddings" in ask.kinds:
        return PoolingParams(pooling="mean")
    own: dict[str, Any] = {"max_tokens": ask.num_tokens, "ignore_eos": True}
    if "n > 1" in ask.kinds:
        own["n"] = 2
    if "logprobs" in ask.kinds:
        own["logprobs"] = NUM_LOGPROBS
    if "prompt logprobs" in ask.kinds:
        own["prompt_logprobs"] = NUM_PROMPT_LOGPROBS
    if "penalties" in ask.kinds:
        own["repetition_penalty"] = asks.REPETITION
        own["presence_penalty"] = asks.PRESENCE
        own["frequency_penalty"] = asks.FREQUENCY
    if "stop strings" in ask.kinds:
        own |= {"stop": list(asks.STOPS), "min_tokens": ask.min_tokens}
    if "thinking budget" in ask.kinds:
        own["thinking_budget"] = asks.BUDGET
    if ask.texts is not None:
        own |= {"max_tokens": 96, "ignore_eos": False}
    if "grammars" in ask.kinds:
        own["structured_outputs"] = StructuredOutputs(choice=GRAMMAR)
    if "tools" in ask.kinds:
        own["structured_outputs"] = StructuredOutputs(choice=TOOLS)
    if "added tokens" in ask.kinds:
        own["structured_outputs"] = StructuredOutputs(choice=MARKED)
    if "seeded sampling" in ask.kinds:
        return SamplingParams(temperature=0.8, seed=asks.SEED, **own)
    return SamplingParams(temperature=0, **own)


def asks_of(features: Collection[str], num_prompts: int) -> list[Ask]:
    """The requests of a run: with all that its features ask for, of each that excludes another, and
    with nothing; of each two at least.
    """
    asked = frozenset(features)
    plain = asked & set(FIELDS)
    bound = plain - {"thinking budget"}  # whose mark no grammar allows
    kinds = [bound | {name} for name in TEXTS if name in asked]
    if "embeddings" in asked:
        kinds.append(frozenset({"embeddings"}))
    kinds += [plain, frozenset()] if plain else [frozenset()]
    asked_of = [*kinds, *kinds, *[plain] * (4 if "preemption" in asked else 2)]
    num_tokens = MANY_TOKENS if "preemption" in asked else NUM_TOKENS
    return [
        Ask(i % num_prompts, kind, "adapters" in asked and i // len(kinds) % 2 == 0, num_tokens)
        for i, kind in enumerate(asked_of)
    ]


def fits(features: Collection[str]) -> bool:
    """Whether there is a model that has all of the features."""
    return model_key(features) is not None
