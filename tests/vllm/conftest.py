"""Imports vLLM before its tests are collected: of what it warns then, nothing is judged here."""

import importlib.util
import warnings

if importlib.util.find_spec("vllm") is not None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import aioserve.vllm.foreign  # noqa: F401
