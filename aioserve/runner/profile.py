"""How long a step takes, as a linear model of what is in it; and the ready-made profiles.

For the simulated runner and for the code that fits one. Knows nothing about models or machines: a
profile says itself where its numbers come from.
"""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from aioserve.errors import ConfigError
from aioserve.nearest import did_you_mean
from aioserve.scheduler.features import StepFeatures
from aioserve.yaml_file import read_struct

PROFILE_FOLDER = Path(__file__).parent / "profiles"

Coefficient = Annotated[float, Meta(ge=0)]


class StepTimeModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Step time: a base, prefill tokens, decodes, context read, attention work, and rows that
    prefill, each at a rate.
    """

    base_ms: Coefficient
    prefill_token_us: Coefficient
    decode_us: Coefficient
    context_token_us: Coefficient
    query_context_ns: Coefficient = 0.0
    prefill_us: Coefficient = 0.0  # per row with more than one token, whatever its length
    encoder_token_us: Coefficient = 0.0
    idle_ms: Coefficient = 0.0  # more for a step that finds the engine idle: it has to wake up
    kv_load_token_us: Coefficient = 0.0  # per token copied between the KV cache and host memory
    kv_read_token_us: Coefficient = 0.0  # per token read from a directory, beside steps
    source: str = ""  # where the numbers come from: measured how and on what, or computed from what
    error: str = ""  # how well they fit, if they were measured

    def seconds(self, features: StepFeatures, num_encoder_tokens: int = 0) -> float:
        """Predicted duration of one step."""
        num_prefill_tokens, num_decodes, num_context, num_query_context, num_prefills = features
        return 1e-3 * self.base_ms + 1e-6 * (
            self.prefill_token_us * num_prefill_tokens
            + self.decode_us * num_decodes
            + self.context_token_us * num_context
            + 1e-3 * self.query_context_ns * num_query_context
            + self.prefill_us * num_prefills
            + self.encoder_token_us * num_encoder_tokens
        )

    def seconds_of_decodes(
        self, num_decodes: int, num_context_tokens: int, num_steps: int
    ) -> list[float]:
        """To the last bit what `seconds` says of `num_steps` steps in a row, each with one token of
        the same `num_decodes` rows, the first of which reads `num_context_tokens`.
        """
        base, rows = 1e-3 * self.base_ms, self.decode_us * num_decodes
        rate, end = self.context_token_us, num_context_tokens + num_steps * num_decodes
        return [
            base + 1e-6 * (rows + rate * context)
            for context in range(num_context_tokens, end, num_decodes)
        ]


def available_profiles() -> list[str]:
    """Names of the profiles that come with the package."""
    return sorted(path.stem for path in PROFILE_FOLDER.glob("*.yaml"))


def load_profile(name_or_path: str) -> StepTimeModel:
    """A profile by name, or from a YAML file. Raises `ConfigError` that says what is wrong."""
    path = Path(name_or_path)
    if path.suffix not in (".yaml", ".yml", ".json"):
        path = PROFILE_FOLDER / f"{name_or_path}.yaml"
        if not path.is_file():
            raise ConfigError(
                f"unknown step-time profile {name_or_path!r}"
                f"{did_you_mean(name_or_path, available_profiles())}; available: "
                f"{', '.join(available_profiles())}; or give a path to a .yaml file"
            )
    return read_struct(path, "step-time profile", StepTimeModel)
