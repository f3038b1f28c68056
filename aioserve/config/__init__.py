"""Every engine-wide setting, once: name, type, default, range and help text.

Command-line flags, YAML keys and `--help` follow from the structs here, one file a section. Options
of one policy are not here: the policy declares them, and they travel in `scheduler.options`.
"""

from aioserve.config.engine import COMMON_SETTINGS, EngineConfig, iter_settings
from aioserve.config.sections import (
    DEFAULT_CHAT_TOKENS,
    DEFAULT_STEP_BUDGET,
    EMBEDDED_MODEL,
    AdapterConfig,
    CacheConfig,
    ImageConfig,
    LogLevel,
    ModelConfig,
    RunnerConfig,
    SchedulerConfig,
    Section,
    ShadowConfig,
    SimulatorConfig,
    SpeculationConfig,
    StructuredOutputsConfig,
    deciding_settings,
)
from aioserve.config.server import AccessConfig, BatchConfig, ScoringConfig, ServerConfig

__all__ = [
    "COMMON_SETTINGS",
    "DEFAULT_CHAT_TOKENS",
    "DEFAULT_STEP_BUDGET",
    "EMBEDDED_MODEL",
    "AccessConfig",
    "AdapterConfig",
    "BatchConfig",
    "CacheConfig",
    "EngineConfig",
    "ImageConfig",
    "LogLevel",
    "ModelConfig",
    "RunnerConfig",
    "SchedulerConfig",
    "ScoringConfig",
    "Section",
    "ServerConfig",
    "ShadowConfig",
    "SimulatorConfig",
    "SpeculationConfig",
    "StructuredOutputsConfig",
    "deciding_settings",
    "iter_settings",
]
