"""docs/architectures.md: written from the outcomes of trials, and read again by the tests."""

import re
from collections.abc import Mapping
from pathlib import Path

from tests.architectures.trial import ALONE, AS_WRITTEN, FUSED, REFUSED, Outcome

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"

_BEGIN = """\
# Supported models

Every text decoder that `transformers` {version} has, by `model_type`: {num_served} of {num_types}
types are served. Each was tried with tiny random weights through the real engine, on a CPU, in
float32, some in several ways: prompts of mixed lengths in pieces, with a prefix cache, under
preemption. All tokens were those of `generate`, greedy. Whether a checkpoint fits into memory, and
whether its quantization is served, is another matter ([quantization.md](quantization.md)).

`python -m tests.architectures` writes this page; `make test-architectures` tries all of them again,
and fails if one is not served as it says. What makes no text from text alone is left out: halves of
encoder-decoders, encoders, models of images and sounds (the text decoder of such a model is here by
a name of its own). Configurations varied at random are tried besides:
`python -m tests.architectures --varied SEED NAME...`.

A model with LongRoPE (`longrope`: Phi-3, Phi-4-mini, MiniCPM3) turns by its long factors at every
length if `--max-model-len` is greater than its original length, as in vLLM, and else by the short
ones. `transformers` takes the short factors for a text up to the original length, and computes it
anew when it grows beyond: there a reply to a short prompt may differ, unless `--max-model-len` is
at most the original length. `dynamic` rotary embeddings are served up to their original length:
beyond it the angles of all rows of a batch would depend on the longest request.
"""
_SECTIONS = {
    FUSED: (
        "Served on fused weights",
        "By our own loop over the layers, proved against the original at start. The fastest. Those "
        "[with experts](experts.md) on a CPU.",
    ),
    AS_WRITTEN: (
        "Served as `transformers` wrote them",
        "Their own modules, which call our attention and find their [states](states.md) in slots: "
        "all requests of a step in one pass. The log says what keeps a model from the fused tier.",
    ),
    ALONE: (
        "Served one request at a time",
        "Their own modules, attention included, once for each request of a step: as fast as the "
        "others for one request, slower for many. What they keep per token lies in the paged "
        "cache, the keys of an indexer included, so that prefixes and preemption are as cheap as "
        "elsewhere; and each is proved at start. On a CPU, in one process; without adapters, log "
        "probabilities of prompts, or vectors.",
    ),
    REFUSED: ("Refused", "In one line at start."),
}
_WITH_REASONS = (ALONE, REFUSED)


def render(outcomes: Mapping[str, Outcome], version: str) -> str:
    """The page. `outcomes` are by the names of cases."""
    types = {name.partition(" ")[0] for name in outcomes}
    served = {name for name in types if outcomes[name].served != REFUSED}
    parts = [_BEGIN.format(version=version, num_types=len(types), num_served=len(served))]
    for kind, (title, text) in _SECTIONS.items():
        own = {name: outcome for name, outcome in outcomes.items() if outcome.served == kind}
        parts += [f"\n## {title}: {len(own)}\n\n", *(line + "\n" for line in _filled(text)), "\n"]
        if kind in _WITH_REASONS:
            parts.append("| `model_type` | why |\n|---|---|\n")
            parts += [f"| {_code(name)} | {own[name].reason} |\n" for name in sorted(own)]
        else:
            parts += [line + "\n" for line in _filled(", ".join(map(_code, sorted(own))) + ".")]
    return "".join(parts)


def claims(page: str) -> dict[str, Outcome]:
    """What the page says, by the names of cases."""
    found = {}
    for served, (title, text) in _SECTIONS.items():
        _, _, section = page.partition(f"\n## {title}: ")
        section = section.partition("\n## ")[0]
        if served in _WITH_REASONS:
            for name, reason in re.findall(r"^\| (`.*?) \| (.*) \|$", section, re.MULTILINE):
                if name != "`model_type`":
                    found[name.replace("`", "")] = Outcome(served, reason)
        else:
            names = " ".join(section.splitlines()[2 + len(_filled(text)) :])
            for name in re.findall(r"`[^,]*(?=[,.])", names):
                found[name.replace("`", "")] = Outcome(served)
    return found


def _code(name: str) -> str:
    """The type as code, what follows as words."""
    model_type, _, way = name.partition(" ")
    return f"`{model_type}` {way}".strip()


def _filled(text: str) -> list[str]:
    """In lines of the length that pages have."""
    import textwrap

    return textwrap.wrap(text, 100, break_long_words=False, break_on_hyphens=False)
