"""Speculative decoding: where draft tokens come from, and how many are tried."""
