"""POST /v1/score and /v1/rerank: how well documents fit queries, by a decoder model.

Knows the shape of these endpoints. Which prompt a model is asked, `template` knows; how likely its
answers are, `likelihoods`.
"""

import time
import uuid
from collections.abc import Sequence

import msgspec
from aiohttp import web

from aioserve.engine import EngineClient
from aioserve.errors import RequestError
from aioserve.server.access.gate import allowed_fields
from aioserve.server.body import decode_body
from aioserve.server.keys import ENGINE
from aioserve.server.openapi import GENERATION_ERRORS, Route
from aioserve.server.protocol import PromptTokensDetails
from aioserve.server.scoring.likelihoods import (
    MAX_LABELS,
    Likelihoods,
    among,
    label_logprobs,
    probabilities,
)
from aioserve.server.scoring.protocol import (
    Asked,
    Ranked,
    RankedText,
    Ranking,
    RerankRequest,
    ScoreData,
    ScoreList,
    ScoreRequest,
    ScoringUsage,
)
from aioserve.server.scoring.template import ScoreTemplate, score_template
from aioserve.server.validation import BodyDecoder

# Characters of a document that are looked at for each token of it that may stay.
CHARACTERS_PER_TOKEN = 16

SCORING = web.AppKey("SCORING", ScoreTemplate)

score_decoder = BodyDecoder(ScoreRequest, "score")
rerank_decoder = BodyDecoder(RerankRequest, "score")
_encoder = msgspec.json.Encoder()


def open_scoring(app: web.Application) -> None:
    """Find the prompt of scores. Raises `ConfigError` for settings that name none."""
    engine = app[ENGINE]
    templates = str(getattr(engine.model_info.tokenizer, "chat_template", None) or "")
    if (template := score_template(engine.config.scoring, templates)) is not None:
        app[SCORING] = template


async def create_score(request: web.Request) -> web.Response:
    """Answer /v1/score: a score of each pair, or of each item and label. Raises `RequestError`,
    and what `add_request` raises.
    """
    body = await decode_body(request, score_decoder)
    own_id = _id(body, "score-")
    if body.label_token_ids is not None:
        return await _score_items(request, body, body.label_token_ids, own_id)
    pairs = body.pairs()
    is_new = body.documents is not None
    found = await _fits(request, body, pairs, own_id, "documents" if is_new else "text_2")
    data = [ScoreData(index=i, score=score) for i, score in enumerate(_scores(found))]
    return _json(
        ScoreList(
            id=own_id,
            created=int(time.time()),
            model=_model(request, body),
            data=data,
            usage=_usage(found),
        )
    )


async def create_ranking(request: web.Request) -> web.Response:
    """Answer /v1/rerank: the best document first, equal ones in the order of the request. Raises
    `RequestError`, and what `add_request` raises.
    """
    body = await decode_body(request, rerank_decoder)
    texts, own_id = body.texts(), _id(body, "rerank-")
    pairs = [(body.query, text) for text in texts]
    found = await _fits(request, body, pairs, own_id, "documents", body.max_tokens_per_doc)
    scores = _scores(found)
    best = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.top_n or None]
    results = [Ranked(index=index, relevance_score=scores[index]) for index in best]
    if body.return_documents is not False:
        for result in results:
            result.document = RankedText(text=texts[result.index])
    model = _model(request, body)
    return _json(Ranking(id=own_id, model=model, results=results, usage=_usage(found)))


async def _score_items(
    request: web.Request, body: ScoreRequest, labels: Sequence[int], own_id: str
) -> web.Response:
    """Each item behind the query (or before it), and how likely the labels are to follow."""
    items, query, engine = body.listed_items(), body.query, request.app[ENGINE]
    if len(labels) > MAX_LABELS:
        raise RequestError(
            f"label_token_ids must hold at most {MAX_LABELS}, got {len(labels)}",
            param="label_token_ids",
        )
    _check_labels(engine, labels)

    async def prompt_of(index: int) -> Sequence[int]:
        first, second = (items[index], query) if body.item_first else (query, items[index])
        if isinstance(first, str) and isinstance(second, str):
            return await engine.tokenize(first + second)
        return [*first, *second]  # type: ignore[misc]  # `listed_items` has seen to it

    places = [f"items[{i}]" for i in range(len(items))]
    fields = allowed_fields(request, body) | {"adapter": body.model or ""}
    found = await label_logprobs(request, own_id, places, prompt_of, labels, fields)
    tell = among if body.apply_softmax else probabilities
    return _json(
        ScoreList(
            id=own_id,
            object="scoring",
            created=int(time.time()),
            model=_model(request, body),
            scores=[tell(own.logprobs) for own in found],
            usage=_usage(found),
        )
    )


async def _fits(
    request: web.Request,
    body: Asked,
    pairs: Sequence[tuple[str, str]],
    own_id: str,
    field: str,
    max_document: int | None = None,
) -> list[Likelihoods]:
    """How likely the template's labels are for each pair of a query and a document."""
    engine, template = request.app[ENGINE], request.app.get(SCORING)
    if template is None:
        raise RequestError(
            "scores are not served with this model: its chat template shows no prompt of a "
            "reranker (see --score-template)",
            param="model",
        )
    labels = [await _label(engine, text) for text in template.labels]
    instruction = body.instruction
    if instruction is None:
        instruction = engine.config.scoring.score_instruction
    limit = body.truncate_prompt_tokens
    if limit is not None and (limit < -1 or limit == 0):
        raise RequestError(
            f"truncate_prompt_tokens must be -1 (the model's limit) or at least 1, got {limit}",
            param="truncate_prompt_tokens",
        )
    if limit is not None:
        longest = engine.max_model_len - 1  # the label has a place
        limit = longest if limit == -1 else min(limit, longest)

    async def prompt_of(index: int) -> Sequence[int]:
        query, document = pairs[index]
        if max_document is not None:
            document = await _cut(engine, document, max_document)
        return await _prompt(engine, template, (query, document, instruction), limit)

    places = [f"{field}[{i}]" for i in range(len(pairs))]
    fields = allowed_fields(request, body) | {"adapter": body.model or ""}
    return await label_logprobs(request, own_id, places, prompt_of, labels, fields)


async def _prompt(
    engine: EngineClient, template: ScoreTemplate, asked: tuple[str, str, str], limit: int | None
) -> Sequence[int]:
    """The token ids of a prompt of at most `limit` tokens, for which the document is cut."""
    query, document, instruction = asked
    if limit is not None:
        document = document[: limit * CHARACTERS_PER_TOKEN]
    while True:
        text = template.render(query, document, instruction)
        token_ids = await engine.tokenize(text, add_special_tokens=False)
        if limit is None or len(token_ids) <= limit:
            return token_ids
        own = await engine.tokenize(document, add_special_tokens=False) if document else []
        if not own:
            raise RequestError(
                f"truncate_prompt_tokens is {limit}, and the prompt has {len(token_ids)} tokens "
                "without a document",
                param="truncate_prompt_tokens",
            )
        shorter = await _cut(engine, document, max(0, len(own) - (len(token_ids) - limit)))
        document = shorter if len(shorter) < len(document) else document[:-1]


async def _cut(engine: EngineClient, document: str, num_tokens: int) -> str:
    """The text of the first `num_tokens` tokens of a document."""
    document = document[: num_tokens * CHARACTERS_PER_TOKEN]
    if not document:
        return ""
    token_ids = await engine.tokenize(document, add_special_tokens=False)
    if len(token_ids) <= num_tokens:
        return document
    return (await engine.detokenize(token_ids[:num_tokens])).rstrip("\ufffd")


async def _label(engine: EngineClient, text: str) -> int:
    token_ids = await engine.tokenize(text, add_special_tokens=False)
    if len(token_ids) != 1:
        raise RequestError(
            f"scores are not served with this model: its tokenizer writes the label {text!r} as "
            f"{len(token_ids)} tokens (see --score-labels)",
            param="model",
        )
    return token_ids[0]


def _check_labels(engine: EngineClient, labels: Sequence[int]) -> None:
    vocab_size = engine.model_info.vocab_size
    for i, label in enumerate(labels):
        if not 0 <= label < vocab_size:
            raise RequestError(
                f"label_token_ids[{i}] must be a token id from 0 to {vocab_size - 1}, got {label}",
                param=f"label_token_ids[{i}]",
            )


def _scores(found: Sequence[Likelihoods]) -> list[float]:
    """The probability of the second of two labels, given that it is one of them."""
    return [among(own.logprobs)[1] for own in found]


def _usage(found: Sequence[Likelihoods]) -> ScoringUsage:
    count, cached = (sum(column) for column in list(zip(*found, strict=True))[1:])
    details = PromptTokensDetails(cached_tokens=cached)
    return ScoringUsage(prompt_tokens=count, total_tokens=count, prompt_tokens_details=details)


def _model(request: web.Request, body: Asked) -> str:
    return body.model or request.app[ENGINE].config.model.served_name


def _id(body: Asked, prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex}" if body.request_id is None else body.request_id


def _json(body: msgspec.Struct) -> web.Response:
    return web.Response(body=_encoder.encode(body), content_type="application/json")


_SCORED = {"text_1": "Who's there?", "text_2": ["Nay, answer me.", "Long live the king!"]}
_RANKED = {"query": "Who's there?", "documents": ["Nay, answer me.", "Long live the king!"]}
_ABOUT_SCORES = "How well documents fit a query, or how likely labels are behind items."
_ABOUT_RANKS = "Documents, those that fit the query best first."

ROUTES = (
    *(
        Route(
            "POST",
            path,
            create_score,
            _ABOUT_SCORES,
            ScoreList,
            body=score_decoder,
            example=_SCORED,
            raises=GENERATION_ERRORS,
        )
        for path in ("/v1/score", "/score")
    ),
    *(
        Route(
            "POST",
            path,
            create_ranking,
            _ABOUT_RANKS,
            Ranking,
            body=rerank_decoder,
            example=_RANKED,
            raises=GENERATION_ERRORS,
        )
        for path in ("/v1/rerank", "/rerank", "/v2/rerank")
    ),
)
