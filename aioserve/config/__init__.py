"""Every engine-wide setting, once: name, type, default, range and help text.

Command-line flags, YAML keys and `--help` follow from the structs here, one file a section. Options
of one policy are not here: the policy declares them, and they travel in `scheduler.options`.
"""

from aioserve.config.access import AccessConfig
from aioserve.config.adapters import AdapterConfig
from aioserve.config.batches import BatchConfig
from aioserve.config.cache import CacheConfig
from aioserve.config.engine import COMMON_SETTINGS, EngineConfig, iter_settings
from aioserve.config.images import ImageConfig
from aioserve.config.model import ModelConfig
from aioserve.config.runner import RunnerConfig
from aioserve.config.scheduler import SchedulerConfig
from aioserve.config.scoring import ScoringConfig
from aioserve.config.section import (
    DEFAULT_CHAT_TOKENS,
    DEFAULT_STEP_BUDGET,
    EMBEDDED_MODEL,
    LogLevel,
    Section,
)
from aioserve.config.server import ServerConfig
from aioserve.config.shadow import ShadowConfig
from aioserve.config.simulation import SimulatorConfig
from aioserve.config.speculation import SpeculationConfig

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
    "iter_settings",
]
