"""Settings of the runner that computes nothing, and takes the time of a profile."""

from typing import Annotated

from aioserve.config.section import NonNegativeFloat, PositiveInt, Section, doc


class SimulatorConfig(Section, frozen=True, kw_only=True):
    """The simulator: step times and made-up tokens. Part of the section `runner`."""

    profile: Annotated[str, doc("simulator: step-time profile, by name or as a .yaml file")] = (
        "example"
    )
    step_base_ms: Annotated[
        NonNegativeFloat | None, doc("simulator: fixed ms per step (default: the profile's)")
    ] = None
    step_prefill_token_us: Annotated[
        NonNegativeFloat | None, doc("simulator: us per prompt token (default: the profile's)")
    ] = None
    step_decode_us: Annotated[
        NonNegativeFloat | None, doc("simulator: us per decoding request (default: the profile's)")
    ] = None
    step_context_token_us: Annotated[
        NonNegativeFloat | None,
        doc("simulator: us per context token read (default: the profile's)"),
    ] = None
    step_query_context_ns: Annotated[
        NonNegativeFloat | None,
        doc("simulator: ns per prompt token and token it attends to (default: the profile's)"),
    ] = None
    step_prefill_us: Annotated[
        NonNegativeFloat | None,
        doc("simulator: us per request with a prompt to compute (default: the profile's)"),
    ] = None
    step_idle_ms: Annotated[
        NonNegativeFloat | None,
        doc("simulator: extra ms of a step after the engine was idle (default: the profile's)"),
    ] = None
    step_encoder_token_us: Annotated[
        NonNegativeFloat | None, doc("simulator: us per encoder token (default: the profile's)")
    ] = None
    step_kv_load_token_us: Annotated[
        NonNegativeFloat | None,
        doc("simulator: us per token the KV connector copies in memory (default: the profile's)"),
    ] = None
    step_kv_read_token_us: Annotated[
        NonNegativeFloat | None,
        doc("simulator: us per token the KV connector reads from disk (default: the profile's)"),
    ] = None
    step_host_factor: Annotated[
        NonNegativeFloat | None,
        doc(
            "simulator: factor on the fixed ms of steps, for a slower host (default: the profile's)"
        ),
    ] = None
    step_cold_ms: Annotated[
        NonNegativeFloat | None,
        doc("simulator: extra ms of the first step of a run (default: the profile's)"),
    ] = None
    step_jitter: Annotated[
        NonNegativeFloat | None,
        doc(
            "simulator: standard deviation of step times as a share of them, drawn by "
            "runner.seed (default: the profile's)"
        ),
    ] = None
    simulated_kv_token_bytes: Annotated[
        PositiveInt, doc("simulator: KV bytes per token, for the KV connector")
    ] = 32768
    simulated_draft_tokens: Annotated[
        int,
        doc(
            "simulator: most draft tokens per request and step; the workload's draft_acceptance "
            "says how many are right",
            ge=0,
        ),
    ] = 0
    simulated_window: Annotated[
        PositiveInt | None,
        doc(
            "simulator: sliding window in tokens, held in --num-window-blocks (default: no window)"
        ),
    ] = None
    simulated_output_tokens: Annotated[
        PositiveInt, doc("simulator: mean reply length in tokens (varies by request)")
    ] = 64
