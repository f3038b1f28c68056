"""Step times of an H100 under vLLM, asked step by step of the package `aiconfigurator-core`.

The package sums measured operators of a card. Two effects that its tables lack are added here,
each as one number of the engine that holds for every experiment.
"""

import contextlib
import importlib
import importlib.util
import io
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from aioserve.errors import ConfigError, one_line
from aioserve.runner.step_times import Prefills, StepTimeOptions, StepTimeSource
from aioserve.scheduler.output import StepFeatures

PACKAGE = "aiconfigurator_core"
CARD, ENGINE, VERSION = "h100_sxm", "vllm", "0.24.0"  # the oldest version that was measured whole
#: KV heads of a card up to which attention of decodes was measured.
MOST_KV_HEADS = 8
#: Estimates are kept by prompts, tokens and rows, and by context in pieces of 64 tokens.
PIECE = 64

_COMMON = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}


def _decoder(
    layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocab: int, kind: str = "llama"
) -> dict[str, Any]:
    """Return the `config.json` of a plain decoder; Mistral's and Yi's are Llama's in all that
    takes time.
    """
    return {
        **_COMMON,
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "vocab_size": vocab,
    }


#: The models of the experiments: their `config.json`, or their name in the package.
MODELS: Mapping[str, dict[str, Any] | str] = {
    "meta-llama/Llama-2-7b-hf": _decoder(32, 4096, 11008, 32, 32, 32000),
    "meta-llama/Llama-3.1-70B-Instruct": "meta-llama/Meta-Llama-3.1-70B",
    "Qwen/Qwen2.5-7B-Instruct": _decoder(28, 3584, 18944, 28, 4, 152064, "qwen2"),
    "mistralai/Mistral-Nemo-Instruct-2407": _decoder(40, 5120, 14336, 32, 8, 131072),
    "01-ai/Yi-34B": _decoder(60, 7168, 20480, 56, 8, 64000),
    "RedHatAI/Llama-4-Scout-17B-16E-Instruct-FP8-dynamic": (
        "meta-llama/Llama-4-Scout-17B-16E-Instruct"
    ),
}
#: FP8 weights with a scale for each channel: the nearest that was measured has one for each block.
_SCOUT = {"moe_ep_size": 1, "weight_dtype": "fp8", "moe_dtype": "fp8_block"}
#: Layers whose attention is kept out of CUDA graphs, as some of it looks at a chunk of the context.
EAGER_LAYERS = {"RedHatAI/Llama-4-Scout-17B-16E-Instruct-FP8-dynamic": 48}


class ForwardTimes(StepTimeSource):
    """A forward pass as the package estimates it, never less than its launches take."""

    source = f"measured operators of aiconfigurator-core, {CARD} under {ENGINE} {VERSION}"
    unevenness = 0.1

    class Options(StepTimeOptions, frozen=True, kw_only=True):
        model: str  # one of `MODELS`
        tensor_parallel: int = 1
        launch_ms: float = 0.0  # of a layer that is launched kernel by kernel, outside of graphs

    def __init__(self, options: Any) -> None:
        """Raises `ConfigError` if the package is missing, or has no times of the model."""
        super().__init__(options)
        if importlib.util.find_spec(PACKAGE) is None:
            raise ConfigError(
                "step times of an H100 need the package aiconfigurator-core: "
                "pip install aiconfigurator-core"
            )
        config = MODELS.get(options.model)
        if config is None:
            raise ConfigError(f"unknown model {options.model}; known: {', '.join(MODELS)}")
        self.machine = f"{options.tensor_parallel} x {CARD}, {options.model}"
        self._least_ms = options.launch_ms * EAGER_LAYERS.get(options.model, 0)
        parallel = options.tensor_parallel
        with TemporaryDirectory() as scratch:
            self._model = _compile(Path(scratch) / "model", config, parallel)
            self._twin, self._share = None, 1
            if isinstance(config, dict):
                heads = config["num_key_value_heads"] // parallel
                if heads > MOST_KV_HEADS:
                    fewer = {**config, "num_key_value_heads": MOST_KV_HEADS * parallel}
                    self._twin = _compile(Path(scratch) / "twin", fewer, parallel)
                    self._share = heads // MOST_KV_HEADS
        self._known: dict[tuple[int, ...], float] = {}
        self._wider: dict[int, float] = {}

    def seconds(self, features: StepFeatures, prefills: Prefills) -> float:
        """Return the seconds of one step, by sums over its rows; steps whose sums of context lie in
        one piece take the same.
        """
        before = sum(end - n for n, end in prefills)
        context = features.num_context_tokens - sum(end for _, end in prefills)
        num_tokens, num_rows = features.num_prefill_tokens, features.num_decodes
        key = (len(prefills), num_tokens, before // PIECE, num_rows, context // PIECE)
        ms = self._known.get(key)
        if ms is None:
            prompts, _, before, _, context = key
            step = (prompts, num_tokens, before * PIECE, num_rows, context * PIECE)
            ms = self._known[key] = max(self._estimate(*step), self._least_ms)
        return 1e-3 * ms

    def _estimate(
        self, prompts: int, num_tokens: int, before: int, num_rows: int, context: int
    ) -> float:
        """Return milliseconds. With more KV heads than were measured, attention is that of the
        largest measured number at a context that is longer by the same factor, so that as many
        bytes are read.
        """
        if num_tokens and not prompts:
            prompts = 1  # draft tokens, which rows verify
        if self._twin is None:
            return _ask(self._model, prompts, num_tokens, before, num_rows, context)
        ms = _ask(self._twin, prompts, num_tokens, before, num_rows, context * self._share)
        return ms + self._wider_ms(num_tokens + num_rows if num_tokens else num_rows)

    def _wider_ms(self, num_tokens: int) -> float:
        """Return what the model takes for a prompt beyond its twin with fewer KV heads, of which
        prompts were measured.
        """
        num_tokens = max(16, num_tokens // 16 * 16)
        if num_tokens not in self._wider:
            times = [_ask(model, 1, num_tokens, 0, 0, 0) for model in (self._model, self._twin)]
            self._wider[num_tokens] = max(times[0] - times[1], 0.0)
        return self._wider[num_tokens]


def _compile(folder: Path, config: dict[str, Any] | str, parallel: int) -> Any:
    """Return the package's model of a forward pass. Raises `ConfigError` if it has none."""
    given: dict[str, Any] = {
        "schema_version": 1,
        "system_name": CARD,
        "backend": ENGINE,
        "backend_version": VERSION,
        "tp_size": parallel,
        "pp_size": 1,
        "weight_dtype": "bfloat16",
        "activation_dtype": "bfloat16",
        "kv_cache_dtype": "bfloat16",
    }
    if isinstance(config, str):
        given["model_name"] = config
        if "Scout" in config:
            given |= {**_SCOUT, "moe_tp_size": parallel}
    else:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
        given["model_name"] = str(folder)
    with _quiet():
        steps = importlib.import_module(f"{PACKAGE}.sdk.rust_engine_step")
        try:
            return steps.RustForwardPassPerfModel.from_native(given)
        except Exception as error:
            raise ConfigError(
                f"aiconfigurator-core has no step times of this model: {one_line(error)}"
            ) from error


def _ask(
    model: Any, prompts: int, num_tokens: int, before: int, num_rows: int, context: int
) -> float:
    found = model.estimate_forward_pass_time_ms(
        {
            "scheduled_requests": {
                "num_prefill_requests": prompts,
                "sum_prefill_tokens": num_tokens,
                "sum_prefill_kv_tokens": before,
                "num_decode_requests": num_rows,
                "sum_decode_kv_tokens": context,
            }
        }
    )
    return float(found)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep back what the package says of each table that it reads."""
    logger = logging.getLogger(PACKAGE)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(before)
