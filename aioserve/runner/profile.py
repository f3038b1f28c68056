"""How long a step takes, as a linear model of what is in it; and the ready-made profiles.

For the simulated runner and for whoever fits one. Knows nothing about models or machines: a
profile says itself where its numbers come from.
"""

from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from aioserve.errors import ConfigError
from aioserve.nearest import did_you_mean
from aioserve.scheduler.output import SchedulerOutput
from aioserve.yaml_file import read_struct

PROFILE_FOLDER = Path(__file__).parent / "profiles"

Coefficient = Annotated[float, Meta(ge=0)]


class StepFeatures(NamedTuple):
    """What a step costs in proportion to."""

    num_prefill_tokens: int  # of rows with more than one token
    num_decodes: int  # rows with one token
    num_context_tokens: int  # sum over rows: keys and values to read
    num_query_context: int  # sum over prefill rows of what each token sees: the attention work
    num_prefills: int = 0  # rows with more than one token


def step_features(output: SchedulerOutput) -> StepFeatures:
    """The features of a planned step."""
    cached = output.scheduled_cached_reqs
    num_decodes = len(cached.req_ids)
    if output.total_num_scheduled_tokens == num_decodes:  # nothing but decodes: most steps are
        return StepFeatures(0, num_decodes, sum(cached.num_computed_tokens) + num_decodes, 0)
    computed = {data.request_id: data.num_computed_tokens for data in output.scheduled_new_reqs}
    computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    prefill = prefills = decodes = context = attention = 0
    for request_id, num_tokens in output.num_scheduled_tokens.items():
        end = computed[request_id] + num_tokens
        context += end
        if num_tokens == 1:
            decodes += 1
        else:
            prefills += 1
            prefill += num_tokens
            attention += num_tokens * (2 * end - num_tokens + 1) // 2
    return StepFeatures(prefill, decodes, context, attention, prefills)


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
