"""The settings of speculative decoding: which method drafts tokens, and how many."""

from typing import Annotated, Literal

from aioserve.config.section import PositiveInt, Section, doc


class SpeculationConfig(Section, frozen=True, kw_only=True):
    """Speculative decoding: how draft tokens are made."""

    speculative_method: Annotated[
        Literal["none", "ngram", "draft"],
        doc(
            "speculative decoding: draft tokens, verified in one pass; ngram: prompt lookup, what "
            "followed the same tokens before, in this text or in recent outputs; draft: the tokens "
            "of --draft-model"
        ),
    ] = "none"
    draft_model: Annotated[
        str | None,
        doc(
            "draft model with the same vocabulary, given as for --model, or the directory of an "
            "EAGLE-3 head"
        ),
    ] = None
    num_speculative_tokens: Annotated[
        PositiveInt, doc("most draft tokens per request and step; fewer while drafts are rejected")
    ] = 8
    prompt_lookup_min: Annotated[
        PositiveInt, doc("ngram drafts: tokens that must match before a draft is made")
    ] = 3
    prompt_lookup_store: Annotated[
        int, doc("ngram drafts: tokens of recent outputs that are searched", ge=0)
    ] = 65536
