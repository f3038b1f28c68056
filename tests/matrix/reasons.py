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
        "drafting model knows of a block is not kept",
        "It is not implemented, because no card was available to test it.",
    ),
    (
        "is served on a CPU alone",
        "It is not implemented, because no card was available to test it.",
    ),
    ("needs the compiled kernels of a CPU", "The kernels that compute it exist for CPUs only."),
    (
        "is a model that sees, which is served on a CPU",
        "It is not implemented, because no card was available to test it.",
    ),
    (
        "are not served on CUDA",
        "It is not implemented, because no card was available to test it.",
    ),
    (
        "but on a CUDA device layers with a",
        "It is served without `--num-window-blocks`: layers with a window then keep all blocks.",
    ),
    (
        "gives no hidden states to make embeddings of",
        "It is not implemented, because no card was available to test it.",
    ),
)


def reason_of(line: str) -> str | None:
    """Why the refusal in `line` stays; None if it is not said."""
    return next((why for part, why in _REASONS if part in line), None)
