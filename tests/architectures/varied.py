"""Tiny models whose configurations differ at random from the trial's: what no case was thought of.

Of each architecture a few fields take other values, most of all those of the library's defaults:
switches, sizes, windows, activations. `python -m tests.architectures --varied SEED NAME...` says
what became of each.
"""

import asyncio
import random
from pathlib import Path
from typing import Any

from tests.architectures.tiny import Case, make_config, make_model
from tests.architectures.trial import Served, reference_tokens, serve, waves

#: Fields that say how a model is run or trained, or which tokens mean what.
_NO_PART = (
    *("use_cache", "output", "return_dict", "dropout", "pdrop", "initializer", "pretraining_tp"),
    *("token", "vocab", "is_encoder", "is_decoder", "cross_attention", "chunk_size_feed", "jitter"),
    *("router_aux", "use_mambapy", "rescale_prenorm", "time_step", "mamba_dt", "z_loss"),
    *(
        "bidirectional",
        "is_causal",
        "fused",
        "kernel",
        "num_mtp",
        "num_nextn",
        "_from_model",
        "transformers",
        "dtype",
    ),
)
_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
_NUMBERS: dict[str, tuple[Any, ...]] = {
    "num_key_value_heads": (1, 2, 4),
    "head_dim": (8, 16, 32),
    "num_hidden_layers": (2, 4, 5),
    "num_experts_per_tok": (1, 2, 3),
    "sliding_window": (None, 1, 8, 24, 4096),
    "max_window_layers": (0, 1, 2, 28),
    "n_shared_experts": (1, 2),
    "first_k_dense_replace": (0, 1),
    "tie_word_embeddings": (True, False),
}
_MOST_CHANGES = 3


def vary(case: Case, seed: int) -> Case:
    """The case with one to three fields changed."""
    rng = random.Random(f"{case.name} {seed}")
    config = make_config(case)
    stated, default = config.to_dict(), type(config)().to_dict()
    choices: dict[str, list[Any]] = {}
    for name, value in stated.items():
        if name.startswith("_") or any(part in name for part in _NO_PART):
            continue
        others: list[Any] = []
        if isinstance(value, bool):
            others = [not value]
        elif name in _NUMBERS:
            others = [number for number in _NUMBERS[name] if number != value]
        elif isinstance(value, str) and value in _ACTIVATIONS:
            others = [other for other in _ACTIVATIONS if other != value]
        elif isinstance(value, float):
            others = [value * 2, value / 2]
        if value is not None and default.get(name, value) is None:
            others.append(None)
        if others:
            choices[name] = others
    names = rng.sample(sorted(choices), min(len(choices), rng.randint(1, _MOST_CHANGES)))
    changes = {name: rng.choice(choices[name]) for name in names}
    if "layer_types" in stated and "num_hidden_layers" in changes:
        del changes["num_hidden_layers"]
    if rng.random() < 0.3 and default.get("layer_types") is None:
        changes["layer_types"] = None
    fields = dict(case.fields) | changes
    return Case(case.model_type, f"{case.way} {changes}".strip(), tuple(fields.items()))


def try_varied(case: Case, path: Path) -> str:
    """What became of a case: `served`, `refused: WHY`, or `no model: WHY` where `transformers` does
    not make or run it. Raises `AssertionError` if a token is wrong, and whatever else is neither.
    """
    try:
        config = make_config(case)
        make_model(config, path)
        expected = reference_tokens(path)
    except Exception as error:
        return f"no model: {str(error).partition(chr(10))[0]:.120}"
    served = asyncio.run(serve(path, waves()))
    if isinstance(served, str):
        assert "\n" not in served, f"more than a line: {served}"
        return f"refused: {served.replace(str(path), 'PATH')}"
    assert isinstance(served, Served)
    assert served.tokens == expected, f"{case.name}: wrong tokens"
    return "served"
