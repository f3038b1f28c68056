"""/v1/score and /v1/rerank: the probabilities that a model gives to labels."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

import aioserve
from aioserve import AsyncClient
from aioserve.apis.scoring.routes import TEMPLATES, score_template
from aioserve.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    RunnerConfig,
    SchedulerConfig,
    ScoringConfig,
)
from aioserve.errors import ConfigError, RequestError
from aioserve.model_source.info import ModelInfo
from tests.server.scripted import make_model
from tests.server.serving import SIMULATED, Server, running

# The loop is the subject of other tests; these load a model each.
on_uvloop = pytest.mark.asyncio(loop_factories=["uvloop"])

EMBEDDED = Path(aioserve.__file__).parent / "model_source" / "embedded"
TOKENIZER = ModelInfo(ModelConfig()).tokenizer
TEXT = "Instruct: {instruction}\nQuery: {query}\nDocument: {document}\nIt is"
LABELS = ("no", "What")  # each is one token of the embedded model
QUERY = "Who killed the king of Denmark, and by what means?"
DOCUMENTS = ["His brother, with poison.", "The rain it raineth every day.", "Nay, answer me.", ""]


class Reference:
    """The embedded model in `transformers`."""

    def __init__(self) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32)

    def logprobs(self, prompt: str | Sequence[int], labels: Sequence[int]) -> list[float]:
        ids = prompt
        if isinstance(prompt, str):
            ids = TOKENIZER.encode(prompt, add_special_tokens=False)
        with torch.inference_mode():
            logits = self._model(torch.tensor([list(ids)])).logits[0, -1]
        found: list[float] = torch.log_softmax(logits.float(), dim=-1)[list(labels)].tolist()
        return found

    def score(self, document: str, query: str = QUERY, instruction: str = "Answer.") -> float:
        text = TEXT.format(query=query, document=document, instruction=instruction)
        ids = [TOKENIZER.encode(label, add_special_tokens=False)[0] for label in LABELS]
        against, own = map(math.exp, self.logprobs(text, ids))
        return own / (against + own)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


def config(tmp_path: Path) -> EngineConfig:
    (tmp_path / "score.txt").write_text(TEXT)
    return EngineConfig(
        model=ModelConfig(max_model_len=256, dtype="float32"),
        cache=CacheConfig(num_kv_blocks=128),
        scheduler=SchedulerConfig(max_num_seqs=4),
        runner=RunnerConfig(threads=1),
        scoring=ScoringConfig(
            score_template=str(tmp_path / "score.txt"),
            score_labels=", ".join(LABELS),
            score_instruction="Answer.",
        ),
    )


async def post(server: Server, path: str, **body: Any) -> Any:
    answer = await server.request("POST", path, json=body)
    assert answer.status == 200, answer
    return answer.json()


@on_uvloop
async def test_scores_are_those_of_the_model(tmp_path: Path, reference: Reference) -> None:
    expected = [reference.score(document) for document in DOCUMENTS]
    assert len({round(value, 4) for value in expected}) == len(DOCUMENTS)
    async with running(config(tmp_path)) as server:
        for path in ("/v1/score", "/score"):
            told = await post(server, path, text_1=QUERY, text_2=DOCUMENTS)
            assert [each["index"] for each in told["data"]] == [0, 1, 2, 3]
            assert [each["score"] for each in told["data"]] == pytest.approx(expected, abs=1e-5)
            # Instruction and query are shared: two blocks of each prompt but the first.
            assert told["usage"]["prompt_tokens_details"]["cached_tokens"] >= 3 * 32
        counts = [
            len(TOKENIZER.encode(TEXT.format(query=QUERY, document=d, instruction="Answer.")))
            for d in DOCUMENTS
        ]
        assert told["usage"]["prompt_tokens"] == told["usage"]["total_tokens"] == sum(counts)
        told = await post(server, "/v1/score", queries=[QUERY, "Hm?"], documents=DOCUMENTS[:2])
        other = reference.score(DOCUMENTS[1], query="Hm?")
        assert told["data"][1]["score"] == pytest.approx(other, abs=1e-5)
        fields = {"text_1": QUERY, "text_2": DOCUMENTS[0], "instruction": "Is it of Denmark?"}
        told = await post(server, "/v1/score", **fields)
        other = reference.score(DOCUMENTS[0], instruction="Is it of Denmark?")
        assert told["data"][0]["score"] == pytest.approx(other, abs=1e-5)


@on_uvloop
async def test_rankings_have_the_best_first_by_every_name_of_the_route(
    tmp_path: Path, reference: Reference
) -> None:
    scores = [reference.score(document) for document in DOCUMENTS]
    order = sorted(range(4), key=lambda i: -scores[i])
    body = {"query": QUERY, "documents": [DOCUMENTS[0], *({"text": d} for d in DOCUMENTS[1:])]}
    async with running(config(tmp_path)) as server:
        # Scores differ in their last bits once prefixes are cached.
        first = await post(server, "/v1/rerank", **body)
        assert [each["index"] for each in first["results"]] == order
        for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
            told = await post(server, path, **body)
            assert [each["index"] for each in told["results"]] == order
            assert [each["document"]["text"] for each in told["results"]] == [
                DOCUMENTS[i] for i in order
            ]
            best = await post(server, path, **body, top_n=2, return_documents=False)
            assert best["results"] == [
                {k: v for k, v in each.items() if k != "document"} for each in told["results"][:2]
            ]
            assert (await post(server, path, **body, top_n=0))["results"] == told["results"]
        async with AsyncClient(server.url) as client:
            found = await client.score(QUERY, DOCUMENTS)
            assert found == pytest.approx(scores, abs=1e-5)
            ranked = await client.rerank(QUERY, DOCUMENTS, top_n=3)
            assert [each.index for each in ranked] == order[:3]
            with pytest.raises(RequestError, match="documents must hold 1 to 2048"):
                await client.rerank(QUERY, [])


@on_uvloop
async def test_labels_of_items_are_as_likely_as_the_model_says(
    tmp_path: Path, reference: Reference
) -> None:
    labels = [TOKENIZER.encode(word, add_special_tokens=False)[0] for word in ("no", "What")]
    labels += [5, 300, 1999]  # not among the most likely: each is asked for alone
    items = ["\nFrancisco.", " Nay, answer me."]
    async with running(config(tmp_path)) as server:
        body = {"query": "Who's there?", "items": items, "label_token_ids": labels}
        told = await post(server, "/v1/score", **body)
        for item, own in zip(items, told["scores"], strict=True):
            expected = reference.logprobs(f"Who's there?{item}", labels)
            assert list(map(math.log, own)) == pytest.approx(expected, abs=1e-4)
        among = await post(server, "/v1/score", **body, apply_softmax=True, item_first=True)
        for item, own in zip(items, among["scores"], strict=True):
            weights = list(map(math.exp, reference.logprobs(f"{item}Who's there?", labels)))
            assert own == pytest.approx([w / sum(weights) for w in weights], abs=1e-5)
        assert among["object"] == "scoring"
        ids = {"query": [5, 6], "items": [[7], [8, 9]], "label_token_ids": [40]}
        told = await post(server, "/v1/score", **ids)
        for item, own in zip(([5, 6, 7], [5, 6, 8, 9]), told["scores"], strict=True):
            assert math.log(own[0]) == pytest.approx(reference.logprobs(item, [40])[0], abs=1e-4)


@on_uvloop
async def test_long_documents_are_cut_if_the_request_says_so(tmp_path: Path) -> None:
    long = "All the world's a stage, and all the men and women merely players. " * 40
    async with running(config(tmp_path)) as server:
        body = {"query": QUERY, "documents": ["short", long]}
        refused = await server.request("POST", "/v1/rerank", json=body)
        assert refused.status == 400
        assert refused.json()["error"]["param"] == "documents[1]"
        for fields, most in (
            ({"truncate_prompt_tokens": -1}, 255),
            ({"truncate_prompt_tokens": 100}, 100),
            ({"max_tokens_per_doc": 20}, 70),
        ):
            told = await post(server, "/v1/rerank", **body, **fields)
            assert told["usage"]["prompt_tokens"] <= 2 * most
            alone = {"text_1": QUERY, "text_2": long, **fields}
            if "max_tokens_per_doc" not in fields:
                one = await post(server, "/v1/score", **alone)
                assert most - 8 < one["usage"]["prompt_tokens"] <= most
        said = await server.request(
            "POST", "/v1/rerank", json={**body, "truncate_prompt_tokens": 3}
        )
        assert "without a document" in said.json()["error"]["message"]


async def test_what_cannot_be_scored_is_refused_with_its_place(server: Server) -> None:
    label = {"query": "a", "items": ["b"], "label_token_ids": [5]}
    for path, body, param in (
        ("score", {"text_1": "a", "text_2": "b"}, "model"),
        ("score", {"text_1": "a"}, "text_2"),
        ("score", {"text_1": "a", "queries": "a", "documents": "b"}, "text_1"),
        ("score", {"queries": ["a", "b"], "documents": ["a", "b", "c"]}, "queries"),
        ("score", {**label, "text_1": "a"}, "text_1"),
        ("score", {**label, "items": [[5]]}, "items[0]"),
        ("score", {**label, "items": []}, "items"),
        ("score", {**label, "query": None}, "query"),
        ("score", {**label, "label_token_ids": []}, "label_token_ids"),
        ("score", {**label, "label_token_ids": [5, 5]}, "label_token_ids"),
        ("score", {**label, "label_token_ids": [99999]}, "label_token_ids[0]"),
        ("score", {**label, "items": ["b" * 99999]}, "items[0]"),
        ("rerank", {"query": "a", "documents": ["b"]}, "model"),
        ("rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("rerank", {"query": "a", "documents": ["b"], "rank_fields": ["title"]}, "rank_fields"),
        ("rerank", {"query": "a", "documents": [{"text": "b", "x": 1}]}, "documents[0].x"),
    ):
        answer = await server.request("POST", f"/v1/{path}", json=body)
        assert (answer.status, answer.json()["error"]["param"]) == (400, param), (body, answer)
    assert (await server.request("POST", "/v1/score", json=label)).status == 200
    assert (await server.request("POST", "/v1/score", json={**label, "model": "x"})).status == 404
    assert set((await server.gauges()).values()) == {0}


def test_qwen3_rerankers_prompt_is_that_of_its_model_card() -> None:
    prefix = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n"
    )
    suffix = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    body = "<Instruct>: {I}\n<Query>: {document}\n<Document>: {query}"
    template = TEMPLATES["qwen3_reranker"]
    # What stands in braces in a text is text.
    assert template.render("{document}", "{query}", "{I}") == prefix + body + suffix
    assert template.labels == ("no", "yes")


async def test_a_chat_template_shows_that_its_model_is_a_reranker(tmp_path: Path) -> None:
    judge = TEMPLATES["qwen3_reranker"].evidence
    template = f"{{{{ '{judge}' }}}}{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}"
    model = ModelConfig(model=make_model(tmp_path, template))
    own = msgspec.structs.replace(
        SIMULATED, model=model, scoring=ScoringConfig(score_labels="no,What")
    )
    body = {"query": "a", "documents": ["b"]}
    async with running(own) as server:
        assert (await server.request("POST", "/v1/rerank", json=body)).status == 200
    own = msgspec.structs.replace(own, scoring=ScoringConfig())
    async with running(own) as server:  # its tokenizer writes `yes` as two
        said = (await server.request("POST", "/v1/rerank", json=body)).json()["error"]["message"]
        assert "the label 'yes' as 2 tokens" in said


def test_settings_that_name_no_prompt_are_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("{query}")
    for settings, said in (
        ({"score_template": str(tmp_path / "b.txt")}, "qwen3_reranker or a file, got"),
        ({"score_template": str(tmp_path / "a.txt")}, r"a.txt lacks \{document\}"),
        ({"score_labels": "yes"}, "two labels, as no,yes, got 'yes'"),
        ({"score_labels": "no,no"}, "two labels"),
    ):
        with pytest.raises(ConfigError, match=said):
            score_template(ScoringConfig(**settings), "")
    assert score_template(ScoringConfig(score_template="none"), "") is None
    assert score_template(ScoringConfig(), "<|im_start|>") is None
    assert score_template(ScoringConfig(score_template="qwen3_reranker"), "") is not None
