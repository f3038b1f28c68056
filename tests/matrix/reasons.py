"""Why what is refused stays refused: for the page, by beginnings and parts of the lines."""

_DRAFTS = (
    "A draft continues the tokens of the step in flight, which are not known when a second step "
    "begins. Where drafts help, depth 1 with drafts is faster than depth 2 without. Tokens that a "
    "grammar forces are known in advance, so they are added at depth 2 as well."
)
_REASONS: tuple[tuple[str, str], ...] = (
    ("at scheduler.pipeline_depth 2 a step begins", _DRAFTS),
    (
        "could not be replayed",
        "A replay would not find these blocks in a connector, so its decisions would differ.",
    ),
    (
        "a decision log does not tell that requests lose",
        "It is served with `running: abort`. A replay of requests that are kept would differ.",
    ),
    (
        "needs the compiled kernels of a CPU",
        "A kernel is missing: the product of 16-bit or int8 activations with weights of few bits, "
        "which exists for CPUs only.",
    ),
    (
        "are not served on CUDA",
        "Kernels are missing: causal convolutions, gated delta rules and state-space scans that "
        "read and write slots of states, which exist for CPUs only.",
    ),
)


def reason_of(line: str) -> str | None:
    """Why the refusal in `line` stays; None if it is not said."""
    return next((why for part, why in _REASONS if part in line), None)
