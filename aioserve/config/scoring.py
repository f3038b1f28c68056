"""The settings of scores and rankings: how a decoder model is asked how well a document fits."""

from typing import Annotated

from aioserve.config.section import Section, doc


class ScoringConfig(Section, frozen=True, kw_only=True):
    """Scores and rankings of documents by the first token of a decoder model's answer."""

    score_template: Annotated[
        str,
        doc(
            "prompt of /v1/score and /v1/rerank: qwen3_reranker, or a file with {query}, "
            "{document} and perhaps {instruction}; auto: detected in the chat template; none: no "
            "prompt"
        ),
    ] = "auto"
    score_labels: Annotated[
        str, doc("the two tokens that are compared, separated by a comma: against, for")
    ] = "no,yes"
    score_instruction: Annotated[str, doc("instruction of requests that state none")] = (
        "Given a web search query, retrieve relevant passages that answer the query"
    )
