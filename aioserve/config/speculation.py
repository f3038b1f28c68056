"""The settings of speculative decoding: which method drafts tokens, and how many."""

from typing import Annotated, Literal

from aioserve.config.section import PositiveInt, Section, doc


class SpeculationConfig(Section, frozen=True, kw_only=True):
    """Speculative decoding: how draft tokens are made."""

    speculative_method: Annotated[
        Literal["none", "ngram", "draft", "mtp"],
        doc(
            "speculative decoding: draft tokens, verified in one pass; ngram: prompt lookup, what "
            "followed the same tokens before, in this text or in recent outputs; draft: the tokens "
            "of --draft-model; mtp: those of the model's own multi-token prediction (MTP) layer, "
            "as checkpoints of DeepSeek-V3, GLM-4.5 to 4.7, Qwen3-Next and Qwen3.5 have one"
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

    @property
    def drafts_by_model(self) -> bool:
        """Whether a model makes the drafts, which has K and V of its own for all tokens."""
        return self.speculative_method in ("draft", "mtp")
