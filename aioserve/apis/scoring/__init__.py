"""Scores of texts by decoder models: /v1/score and /v1/rerank, from logits of the next token."""
