"""docs/architectures.md: written from the outcomes of trials, and read again by the tests."""

import re
from collections.abc import Mapping
from pathlib import Path

from tests.architectures.trial import ALONE, AS_WRITTEN, FUSED, REFUSED, Outcome

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"

_BEGIN = """\
# Supported models

This page lists every text decoder of `transformers` {version} by `model_type`: {num_served} of
{num_types} types are served. Each was tested with tiny random weights in the real engine, on a
CPU, in float32, some in several configurations: prompts of mixed lengths in chunks, with a
prefix cache and with preemption. All tokens equal those of greedy `generate`. Whether a
checkpoint fits into memory, and whether its quantization is supported, is a separate question
([quantization.md](quantization.md)).

`python -m tests.architectures` writes this page; `make test-architectures` tries all of them
again, and fails if one is not served as the page says. Models that do not generate text from
text alone are left out: encoders, encoder-decoders, models of images and sounds (their text
decoders have their own names here). To test random configurations, run
`python -m tests.architectures --varied SEED NAME...`.

A model with LongRoPE (`longrope`: Phi-3, Phi-4-mini, MiniCPM3) uses its long factors at every
length if `--max-model-len` is greater than its original length, as in vLLM, and otherwise the
short ones. `transformers` uses the short factors for a text up to the original length, and
computes it again when it becomes longer. So a reply to a short prompt may differ from
`transformers`, unless `--max-model-len` is at most the original length. `dynamic` rotary
embeddings are served up to their original length: beyond it the angles of all rows of a batch
would depend on the longest request.
"""
_SECTIONS = {
    FUSED: (
        "Served on fused weights",
        "aioserve runs the layers itself, after a check against the original at the start. This "
        "is the fastest way. Models [with experts](experts.md) are fused only on a CPU.",
    ),
    AS_WRITTEN: (
        "Served as `transformers` wrote them",
        "The modules of `transformers` run with aioserve's attention and [states](states.md), "
        "with all requests of a step in one pass. The log says why a model is not fused.",
    ),
    ALONE: (
        "Served one request at a time",
        "The modules of `transformers`, including attention, run once for each request of a "
        "step: as fast as the others for one request, slower for many. Their data per token, "
        "including the keys of an indexer, is in the paged KV cache, so that cached prefixes "
        "and preemption cost no more than for other models; each model is checked at the start. "
        "They run on a CPU in one process, without adapters, log probabilities of prompts, or "
        "vectors.",
    ),
    REFUSED: ("Refused", "The start ends with an error that gives this reason."),
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
