"""Scores and rankings by a remote aioserve as async Python methods: `score` and `rerank`.

Speaks the wire structs of the server's routes for scoring.
"""

from collections.abc import Sequence

import msgspec

from aioserve.client_connection import Connection
from aioserve.server.scoring.protocol import (
    Ranked,
    Ranking,
    RerankRequest,
    ScoreList,
    ScoreRequest,
)

_encoder = msgspec.json.Encoder()


class ScoringMethods(Connection):
    """What a client asks of a reranker model."""

    async def score(
        self, query: str, documents: Sequence[str], *, instruction: str | None = None
    ) -> list[float]:
        """How well each of `documents` fits the query, between 0 and 1, as a reranker model says;
        in their order. `instruction` is what makes a document fit, in words.
        """
        asked = ScoreRequest(
            model=self.model, text_1=query, text_2=list(documents), instruction=instruction
        )
        told = await self._asked(ScoreList, "POST", "/v1/score", _encoder.encode(asked))
        return [each.score for each in told.data or ()]

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        instruction: str | None = None,
    ) -> list[Ranked]:
        """The `top_n` of `documents` that fit the query best, or all, the best first: `index` is
        the place among `documents`, `relevance_score` lies between 0 and 1.
        """
        asked = RerankRequest(
            model=self.model,
            query=query,
            documents=list(documents),
            top_n=top_n,
            instruction=instruction,
            return_documents=False,
        )
        told = await self._asked(Ranking, "POST", "/v1/rerank", _encoder.encode(asked))
        return told.results
