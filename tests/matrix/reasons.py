"""Why what is refused stays refused: for the page, by beginnings and parts of the lines."""

_DRAFTS = (
    "The step in flight decides what a draft continues: a second step would begin with nothing to "
    "draft from. Where drafts pay, depth 1 with them does more than depth 2 without. Tokens that a "
    "grammar forces are known: they are sent along at depth 2 as well."
)
_REASONS: tuple[tuple[str, str], ...] = (
    ("at scheduler.pipeline_depth 2 a step begins", _DRAFTS),
    (
        "could not be replayed",
        "A replay has no such blocks, and would decide otherwise.",
    ),
    (
        "a decision log does not tell that requests lose",
        "With `running: abort` it is served; kept requests would be replayed otherwise.",
    ),
    (
        "drafting model knows of a block is not kept",
        "Not built: nothing could be tried on a card here.",
    ),
    ("is served on a CPU alone", "Not built: nothing could be tried on a card here."),
    ("needs the compiled kernels of a CPU", "The kernels are for CPUs."),
    (
        "is a model that sees, which is served on a CPU",
        "Not built: nothing could be tried on a card here.",
    ),
    (
        "are not served on CUDA",
        "Not built: nothing could be tried on a card here.",
    ),
    (
        "but on a CUDA device layers with a",
        "Without `--num-window-blocks` it is served: layers with a window keep all blocks.",
    ),
    (
        "gives no hidden states to make embeddings of",
        "Not built: nothing could be tried on a card here.",
    ),
)


def reason_of(line: str) -> str | None:
    """Why the refusal in `line` stays; None if it is not said."""
    return next((why for part, why in _REASONS if part in line), None)
