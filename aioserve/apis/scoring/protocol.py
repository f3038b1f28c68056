"""The wire structs of scores and rankings, as vLLM, SGLang, Jina and Cohere have them.

Requests refuse unknown fields, as in `protocol`. Knows nothing about HTTP or the engine.
"""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from aioserve.errors import RequestError
from aioserve.server.protocol import EngineRequest, Int, PromptTokensDetails, RequestPart

MAX_DOCUMENTS = 2048  # of one request


class Asked(EngineRequest, kw_only=True, omit_defaults=True):
    """Base of the bodies of /v1/score and /v1/rerank. What is cut off a prompt that is longer
    than `truncate_prompt_tokens` (-1: than the model takes) is the end of its document.
    """

    instruction: str | None = None  # extension: what makes a document fit


class ScoreRequest(Asked, kw_only=True, omit_defaults=True):
    """The JSON body of POST /v1/score: pairs of texts, or items with label tokens."""

    # Pairs: one query and any number of documents, or as many queries as documents.
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None  # vLLM's newer name of text_1
    documents: str | list[str] | None = None  # vLLM's newer name of text_2
    # Items, as in SGLang: the prompt is the query with an item behind it.
    query: str | list[Int] | None = None
    items: str | list[str | list[Int]] | None = None
    label_token_ids: list[Int] | None = None
    apply_softmax: bool | None = None  # true: among the labels; default: among all tokens
    item_first: bool | None = None  # true: the item stands before the query

    def pairs(self) -> list[tuple[str, str]]:
        """Queries and documents. Raises `RequestError` for numbers of them that do not fit."""
        queries = _one_of("text_1", self.text_1, "queries", self.queries)
        documents = _one_of("text_2", self.text_2, "documents", self.documents)
        _check_number("documents", documents)
        if len(queries) == 1:
            queries = queries * len(documents)
        if len(queries) != len(documents):
            raise RequestError(
                f"there are {len(queries)} queries and {len(documents)} documents: give one query, "
                "or as many as documents",
                param="queries" if self.queries is not None else "text_1",
            )
        return list(zip(queries, documents, strict=True))

    def listed_items(self) -> list[str | list[int]]:
        """Return the items. Raises `RequestError` for those that do not go with the query."""
        for name in ("text_1", "text_2", "queries", "documents", "instruction"):
            if getattr(self, name) is not None:
                raise RequestError(f"{name} cannot be combined with label_token_ids", param=name)
        if self.query is None or self.items is None:
            missing = "query" if self.query is None else "items"
            raise RequestError(f"label_token_ids also needs {missing}", param=missing)
        given: list[str | list[int]] = (
            [self.items] if isinstance(self.items, str) else list(self.items)
        )
        _check_number("items", given)
        for i, item in enumerate(given):
            if isinstance(item, str) != isinstance(self.query, str):
                raise RequestError(
                    "query and items must both be texts, or both be token ids", param=f"items[{i}]"
                )
        if not self.label_token_ids or len(set(self.label_token_ids)) != len(self.label_token_ids):
            raise RequestError(
                "label_token_ids must hold at least one token id, and no id twice",
                param="label_token_ids",
            )
        return given


class RerankDocument(RequestPart, kw_only=True):
    """A document to rank, where it is an object with a text."""

    text: str


class RerankRequest(Asked, kw_only=True, omit_defaults=True):
    """The JSON body of POST /v1/rerank: a query, and documents to order by how well they fit."""

    query: str
    documents: list[str | RerankDocument]
    top_n: Int | None = None  # that many of the best; 0: all
    return_documents: bool | None = None  # false: results have no document
    max_tokens_per_doc: Int | None = None  # as at Cohere: the rest of a document is cut off

    def texts(self) -> list[str]:
        """Return the texts of the documents. Raises `RequestError` for a number out of its
        range.
        """
        _check_number("documents", self.documents)
        for name, least in (("top_n", 0), ("max_tokens_per_doc", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise RequestError(f"{name} must be at least {least}, got {value}", param=name)
        return [each if isinstance(each, str) else each.text for each in self.documents]


class ScoringUsage(msgspec.Struct, kw_only=True):
    """Token counts of scoring: the tokens of all prompts, each prompt once."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails


class ScoreData(msgspec.Struct, kw_only=True):
    """The score of one pair, between 0 and 1."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreList(msgspec.Struct, kw_only=True):
    """The response of POST /v1/score: a score per pair, or per item and label."""

    id: str
    object: Literal["list", "scoring"] = "list"
    created: int
    model: str
    data: list[ScoreData] | UnsetType = UNSET  # of pairs
    scores: list[list[float]] | UnsetType = UNSET  # of items: by item, in the order of labels
    usage: ScoringUsage


class RankedText(msgspec.Struct, kw_only=True):
    """The text of a ranked document."""

    text: str


class Ranked(msgspec.Struct, kw_only=True):
    """A ranked document: its place in the request, and its score, between 0 and 1."""

    index: int
    relevance_score: float
    document: RankedText | UnsetType = UNSET


class Ranking(msgspec.Struct, kw_only=True):
    """The response of POST /v1/rerank: the documents, the best first."""

    id: str
    object: Literal["list"] = "list"
    model: str
    results: list[Ranked]
    usage: ScoringUsage


def _one_of(
    name: str, own: str | list[str] | None, other_name: str, other: str | list[str] | None
) -> list[str]:
    if (own is None) == (other is None):
        what = "missing" if own is None else "given under two names"
        raise RequestError(f"{name} (or {other_name}) is {what}", param=name)
    given = own if own is not None else other
    assert given is not None
    return [given] if isinstance(given, str) else given


def _check_number(name: str, given: list[Any]) -> None:
    if not 1 <= len(given) <= MAX_DOCUMENTS:
        raise RequestError(
            f"{name} must hold 1 to {MAX_DOCUMENTS} entries, got {len(given)}", param=name
        )
