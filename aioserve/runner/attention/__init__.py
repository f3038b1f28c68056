"""Attention over a paged KV cache: the seam, and where models of `transformers` meet it.

Whatever computes it knows blocks, slots and lengths; it knows nothing about requests or models.
"""
