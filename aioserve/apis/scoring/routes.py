"""POST /v1/score and /v1/rerank: how well documents fit queries, by a decoder model.

A template is the prompt in which the model is asked; likelihoods of label tokens are its answer.
"""

import asyncio
import math
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import msgspec
from aiohttp import web

from aioserve.apis.scoring.protocol import (
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
from aioserve.config import ScoringConfig
from aioserve.engine import EngineClient
from aioserve.errors import (
    AioserveError,
    ConfigError,
    RequestAbortedError,
    RequestError,
    RequestTimeoutError,
)
from aioserve.outputs import FinishReason, RequestOutput
from aioserve.params import MAX_LOGPROBS, SamplingParams
from aioserve.server.access.gate import allowed_fields, estimated_tokens
from aioserve.server.body import GENERATION_ERRORS, BodyDecoder, Route, decode_body, json_response
from aioserve.server.embeddings import run_each
from aioserve.server.protocol import PromptTokensDetails
from aioserve.server.running import ENGINE

# The prompt in which a decoder model is asked whether a document answers a query. Knows
# Qwen3-Reranker's prompt, and files. Knows nothing about requests.


_FIELD = re.compile(r"\{(query|document|instruction)\}")


class ScoreTemplate(msgspec.Struct, frozen=True):
    """A prompt with {query}, {document} and perhaps {instruction}; the labels that may follow it.

    The score is the probability of the second label among the two.
    """

    text: str
    labels: tuple[str, str] = ("no", "yes")
    evidence: str = ""  # what of a chat template shows that its model was trained for this prompt

    def render(self, query: str, document: str, instruction: str) -> str:
        """Return the prompt that asks whether the document answers the query."""
        given = {"query": query, "document": document, "instruction": instruction}
        return _FIELD.sub(lambda found: given[found[1]], self.text)


_QUERY = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
#: By the names of the setting. Qwen3-Reranker's is that of its model card.
TEMPLATES: Mapping[str, ScoreTemplate] = {
    "qwen3_reranker": ScoreTemplate(
        f"<|im_start|>system\n{_QUERY}<|im_end|>\n<|im_start|>user\n<Instruct>: {{instruction}}\n"
        "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n"
        "<think>\n\n</think>\n\n",
        evidence=_QUERY,
    ),
}


def score_template(settings: ScoringConfig, chat_template: str) -> ScoreTemplate | None:
    """Return the template that the settings name, with their labels; None if there is none. Raises
    `ConfigError` for a name that is no template, and for a file without {query} and {document}.
    """
    name = settings.score_template
    if name == "none":
        return None
    labels = [label.strip() for label in settings.score_labels.split(",")]
    if len(labels) != 2 or not all(labels) or labels[0] == labels[1]:
        raise ConfigError(
            f"scoring.score_labels must be two labels, as no,yes, got {settings.score_labels!r}"
        )
    if name == "auto":
        found = (each for each in TEMPLATES.values() if each.evidence in chat_template)
        template = next(found, None)
    else:
        template = TEMPLATES.get(name) or _read(name)
    if template is None:
        return None
    return msgspec.structs.replace(template, labels=(labels[0], labels[1]))


def _read(name: str) -> ScoreTemplate:
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"scoring.score_template must be auto, none, {', '.join(TEMPLATES)} or a file, got "
            f"{name!r}: {error}"
        ) from error
    named = set(_FIELD.findall(text))
    if missing := sorted({"query", "document"} - named):
        raise ConfigError(
            f"scoring.score_template: the file {name} lacks "
            + " and ".join(f"{{{m}}}" for m in missing)
        )
    return ScoreTemplate(text)


# How likely label tokens are to follow prompts: from the engine's logprobs of one token. A request
# is greedy among the labels: its token is the likeliest of them, and the alternatives tell of the
# others. A label that is not among the alternatives is asked for alone, with the same prompt in the
# prefix cache. Knows nothing about templates or wire structs.


MAX_LABELS = 128


class Likelihoods(NamedTuple):
    """The logprobs of the labels behind one prompt, and how long the prompt is."""

    logprobs: list[float]  # in the order of labels
    num_prompt_tokens: int
    num_cached_tokens: int  # tokens of the prompt that the prefix cache had


async def label_logprobs(
    request: web.Request,
    own_id: str,
    places: Sequence[str],
    prompt_of: Callable[[int], Awaitable[Sequence[int]]],
    labels: Sequence[int],
    fields: Mapping[str, Any],
    num_tokens: int,
) -> list[Likelihoods]:
    """Return how likely `labels` are behind each prompt. `places` are where the prompts come from
    in the body; `prompt_of` makes the token ids of one; all of them have about `num_tokens`.

    Raises what `run_each` raises.
    """
    engine = request.app[ENGINE]
    found: dict[int, Likelihoods] = {}
    tokenizing = asyncio.Lock()

    async def run_one(index: int, request_id: str, check: Callable[[], None]) -> None:
        # One prompt per turn of the loop: short ones are tokenized on it.
        async with tokenizing:
            prompt = await prompt_of(index)
            await asyncio.sleep(0)
        check()
        found[index] = await _likelihoods(engine, prompt, labels, request_id, fields)

    await run_each(request, own_id, places, lambda: num_tokens + len(places), run_one)
    return [found[index] for index in range(len(places))]


async def _likelihoods(
    engine: EngineClient,
    prompt: Sequence[int],
    labels: Sequence[int],
    request_id: str,
    fields: Mapping[str, Any],
) -> Likelihoods:
    found: dict[int, float] = {}
    missing, num_cached = list(labels), 0
    while missing:
        # All of them first; then those that the alternatives did not tell, one by one.
        asked = missing[:1] if found else missing
        params = SamplingParams(
            max_tokens=1,
            temperature=0,
            allowed_token_ids=tuple(asked),
            logprobs=0 if len(labels) == 1 else MAX_LOGPROBS,
            detokenize=False,
            ignore_eos=True,
        )
        output = await engine.generate_one(prompt, params, request_id=request_id, **fields)
        if not output.logprobs:
            raise _unfinished(output)
        [own] = output.logprobs
        if not found:
            num_cached = output.num_cached_tokens
        told = dict(zip(own.top_token_ids, own.top_logprobs, strict=True))
        told[output.token_ids[0]] = own.logprob
        if len(asked) == 1:
            told.setdefault(asked[0], own.logprob)  # a simulated runner says any token
        found |= {label: told[label] for label in asked if label in told}
        if not found:
            found[asked[0]] = own.logprob
        missing = [label for label in labels if label not in found]
    return Likelihoods([found[label] for label in labels], len(prompt), num_cached)


def _unfinished(output: RequestOutput) -> AioserveError:
    if output.finish_reason is FinishReason.TIMEOUT:
        return RequestTimeoutError("the request timed out before all prompts were scored")
    return RequestAbortedError(f"request {output.request_id} was aborted")


def probabilities(logprobs: Sequence[float]) -> list[float]:
    """Return the probabilities of labels among all tokens, from their logprobs."""
    return [math.exp(value) for value in logprobs]


def among(logprobs: Sequence[float]) -> list[float]:
    """Return the probabilities of labels, given that one of the labels follows, from their
    logprobs.
    """
    best = max(logprobs)
    if not math.isfinite(best):
        return [1 / len(logprobs)] * len(logprobs)
    weights = [math.exp(value - best) for value in logprobs]
    return [weight / sum(weights) for weight in weights]


# Characters of a document that are looked at for each token of it that may stay.
CHARACTERS_PER_TOKEN = 16

#: Of engines whose scores were asked for, or whose settings name a prompt of them.
_templates: WeakKeyDictionary[EngineClient, ScoreTemplate | None] = WeakKeyDictionary()

score_decoder = BodyDecoder(ScoreRequest, "score")
rerank_decoder = BodyDecoder(RerankRequest, "score")


def open_scoring(app: web.Application, max_bytes: int) -> None:
    """Raises `ConfigError` for settings that name no prompt of scores."""
    template_of(app[ENGINE])


def template_of(engine: EngineClient) -> ScoreTemplate | None:
    """Return the prompt of scores with this model; None if there is none. Raises `ConfigError`."""
    if engine not in _templates:
        shown = str(getattr(engine.model_info.tokenizer, "chat_template", None) or "")
        _templates[engine] = score_template(engine.config.scoring, shown)
    return _templates[engine]


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
    return json_response(
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
    return json_response(Ranking(id=own_id, model=model, results=results, usage=_usage(found)))


async def _score_items(
    request: web.Request, body: ScoreRequest, labels: Sequence[int], own_id: str
) -> web.Response:
    """Return each item behind the query (or before it), and how likely the labels are to follow."""
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
    num_tokens = len(items) * estimated_tokens(query) + sum(map(estimated_tokens, items))
    found = await label_logprobs(request, own_id, places, prompt_of, labels, fields, num_tokens)
    tell = among if body.apply_softmax else probabilities
    return json_response(
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
    """Return how likely the template's labels are for each pair of a query and a document."""
    engine = request.app[ENGINE]
    template = template_of(engine)
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
    num_tokens = 0
    for query, document in pairs:
        num_own = estimated_tokens(document)
        if max_document is not None:
            num_own = min(num_own, max_document)
        num_own += estimated_tokens(query) + estimated_tokens(instruction)
        num_tokens += num_own if limit is None else min(num_own, limit)
    return await label_logprobs(request, own_id, places, prompt_of, labels, fields, num_tokens)


async def _prompt(
    engine: EngineClient, template: ScoreTemplate, asked: tuple[str, str, str], limit: int | None
) -> Sequence[int]:
    """Return the token ids of a prompt of at most `limit` tokens, for which the document is cut."""
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
    """Return the text of the first `num_tokens` tokens of a document."""
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
    """Return the probability of the second of two labels, given that it is one of them."""
    return [among(own.logprobs)[1] for own in found]


def _usage(found: Sequence[Likelihoods]) -> ScoringUsage:
    count, cached = (sum(column) for column in list(zip(*found, strict=True))[1:])
    details = PromptTokensDetails(cached_tokens=cached)
    return ScoringUsage(prompt_tokens=count, total_tokens=count, prompt_tokens_details=details)


def _model(request: web.Request, body: Asked) -> str:
    return body.model or request.app[ENGINE].config.model.served_name


def _id(body: Asked, prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex}" if body.request_id is None else body.request_id


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
