"""Small random models by which a card is asked whether the paths of real models hold on it.

A case is a model, settings and requests. A card serves the requests, several steps in flight, from
CUDA graphs, in bfloat16, in a KV pool that is too small for all of them; then the CPU runner
computes in float32 how likely each token of the replies is. What the card said of it has to agree,
and each token has to be one that the settings of its request allow. Tokens are not compared:
bfloat16 decides a near tie either way. Knows engines and requests; knows nothing about stages.
"""

import asyncio
import math
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import aioserve
from aioserve import AsyncEngine, SamplingParams
from aioserve.config import (
    AdapterConfig,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    RunnerConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from aioserve.engine.prompt import Encoded
from aioserve.features.spec_decode.draft_length import DraftLength
from aioserve.outputs import SchedulerStats, TokenLogprobs
from aioserve.params import StructuredOutputs
from aioserve.request import EncoderInput
from aioserve.runner.interface import RunnerInterface

PAGE_SIZE = 16
VOCAB_SIZE = 512
EMBEDDED = Path(aioserve.__file__).parent / "model_source" / "embedded"
FEW = (300, 303, 306, 309)
ALL_ARE_SCORED = 20  # tokens of a vocabulary of which the CPU tells how likely each is


class WrongNumbersError(Exception):
    """The numbers of a part are not what they should be; the message says by how much."""


class Bounds(NamedTuple):
    """How much log probabilities may be off."""

    worst: float = 0.3  # of one token; bfloat16 alone makes a tenth of it
    mean: float = 0.02


BOUNDS = Bounds()
ROUTED = Bounds(1.5, 0.04)  # bfloat16 may send a token to another expert where two are alike
COARSE = Bounds(1.0, 0.12)  # numbers of four significant bits
SCALED = Bounds(0.3, 0.04)  # norms behind attention that make much of little


# What is served.


class Ask(NamedTuple):
    """A request that is sent to the model of a case."""

    prompt: list[int]
    params: SamplingParams
    adapter: str = ""
    images: Sequence[EncoderInput] = ()

    def and_then(self, token_ids: Sequence[int]) -> list[int] | Encoded:
        """Return the prompt with more tokens behind it, as an engine takes it."""
        together = [*self.prompt, *token_ids]
        return Encoded(together, self.images) if self.images else together


class Reply(NamedTuple):
    """What came of a request, and how likely that was by the card."""

    ask: Ask
    token_ids: list[int]
    logprobs: list[float]  # of `token_ids`
    of_prompt: list[float]  # of the tokens of the prompt but the first, if they were asked for
    text: str


class Case(NamedTuple):
    """A model, settings, and requests that ask for `ways` in turn."""

    name: str
    fields: dict[str, Any]  # of the model's configuration in transformers
    ways: tuple[dict[str, Any], ...] = ({"temperature": 0}, {"temperature": 0.8})
    bounds: Bounds = BOUNDS
    kv_cache_dtype: Any = "auto"
    speculation: SpeculationConfig = SpeculationConfig()
    has_tokenizer: bool = False
    num_kv_blocks: int = 18  # too few for the requests that run at a time
    num_window_blocks: int | None = None  # few as well; prompts are computed in pieces then
    #: Of a seeing model: what its encoder reads of a random image, whose tokens are so many.
    image: Callable[[np.random.Generator], tuple[int, dict[str, np.ndarray]]] | None = None


LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,  # four to a KV head: tensor cores decode
    "head_dim": 128,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,  # so that a token depends on what came before it
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
WINDOW = 24
#: One way to choose tokens each. The first two are asked for beside it.
EDITED: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "frequency_penalty": 0.7, "presence_penalty": 0.5},
    {"temperature": 0, "logit_bias": {5: 3.0, 9: -100.0}},
    {"temperature": 0, "allowed_token_ids": FEW, "bad_words_ids": ((300, 303), (306, 306, 309))},
    {"temperature": 0.8, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.3},
    {"temperature": 0.8, "min_p": 0.3},
    {"temperature": 0, "prompt_logprobs": 2},
)
MASKED: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "structured_outputs": StructuredOutputs(regex="[a-z]{3}-[0-9]{2,30}")},
    {"temperature": 1.0, "structured_outputs": StructuredOutputs(regex="(to be|or not){2}")},
    {"temperature": 0, "ignore_eos": True},
    {"temperature": 1.0, "structured_outputs": StructuredOutputs(regex="[xyz]{4} [0-9]{9,}")},
)
GUESSED: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0, "prompt_logprobs": 1},
)
NGRAM = SpeculationConfig(speculative_method="ngram", prompt_lookup_min=2)

IMAGE_TOKEN = 500
#: M-RoPE, and rows of images that are added behind the first layers.
QWEN_VL: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "text_config": {name: own for name, own in LLAMA.items() if name != "model_type"}
    | {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [24, 20, 20],
        }
    },
    "vision_config": {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 4,
        "patch_size": 4,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
        "out_hidden_size": LLAMA["hidden_size"],
        "initializer_range": 0.1,
    },
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": IMAGE_TOKEN + 1,
    "vision_start_token_id": IMAGE_TOKEN + 2,
    "vision_end_token_id": IMAGE_TOKEN + 3,
    "tie_word_embeddings": False,
}
#: Tokens of an image see each other, which causal kernels do not let them.
GEMMA_3: dict[str, Any] = {
    "model_type": "gemma3",
    "text_config": {name: own for name, own in LLAMA.items() if name != "model_type"}
    | {
        "head_dim": 256,
        "num_attention_heads": 2,
        "query_pre_attn_scalar": 64,
        "sliding_window": WINDOW,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    },
    "vision_config": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 4,
    },
    "mm_tokens_per_image": 16,
    "image_token_index": IMAGE_TOKEN,
    "boi_token_index": IMAGE_TOKEN + 1,
    "eoi_token_index": IMAGE_TOKEN + 2,
}


def qwen_image(random: np.random.Generator) -> tuple[int, dict[str, np.ndarray]]:
    """Return an image of 2 to 12 tokens, each of four patches of 4 x 4 pixels."""
    height, width = 2 * int(random.integers(1, 4)), 2 * int(random.integers(2, 5))
    pixels = random.standard_normal((height * width, 3 * 2 * 4 * 4), dtype=np.float32)
    grid = np.array([[1, height, width]])
    return height * width // 4, {"pixel_values": pixels, "image_grid_thw": grid}


def gemma_image(random: np.random.Generator) -> tuple[int, dict[str, np.ndarray]]:
    """Return an image of 32 x 32 pixels."""
    return 16, {"pixel_values": random.standard_normal((1, 3, 32, 32), dtype=np.float32)}


#: Where their attention is no other than that of `card_stages.KINDS`, kernels are packed for it.
CASES = (
    Case(
        "windows beside full layers, soft caps, heads of 256",
        LLAMA
        | {
            "model_type": "gemma2",
            "num_attention_heads": 2,
            "head_dim": 256,
            "query_pre_attn_scalar": 64,
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": True,
        },
        bounds=SCALED,
    ),
    Case(
        "7 query heads of 64 to a KV head",
        LLAMA
        | {
            "model_type": "qwen2",
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "head_dim": 64,
        },
    ),
    Case("fp8 KV", LLAMA, bounds=COARSE, kv_cache_dtype="fp8"),
    Case(
        "experts",
        LLAMA
        | {
            "model_type": "qwen3_moe",
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 96,
            "norm_topk_prob": True,
        },
        bounds=ROUTED,
    ),
    Case("penalties, limits, prompts' log probabilities", LLAMA, EDITED),
    # Requests come when their grammars are compiled, and end soon.
    Case("grammars", LLAMA | {"vocab_size": 2048}, MASKED, has_tokenizer=True, num_kv_blocks=10),
    # Of so few tokens, drafts that know nothing are often right.
    Case("n-gram drafts", LLAMA | {"vocab_size": ALL_ARE_SCORED}, GUESSED, speculation=NGRAM),
    Case("images", QWEN_VL, image=qwen_image),
)

#: What pytest asks besides.
MORE_CASES = (
    Case("4 query heads of 64 to a KV head", LLAMA | {"head_dim": 64}),
    Case(
        "8 query heads to a KV head, normalized heads",
        LLAMA | {"model_type": "qwen3", "num_attention_heads": 8},
    ),
    Case(
        "2 query heads to a KV head: no tensor cores",
        LLAMA | {"model_type": "qwen3", "num_key_value_heads": 2},
    ),
    Case("heads of 256", LLAMA | {"head_dim": 256}),
    Case(
        "windows in all layers",
        LLAMA | {"model_type": "mistral", "sliding_window": WINDOW},
    ),
    Case(
        "windows of normalized heads, two ways to turn them",
        LLAMA
        | {
            "model_type": "gemma3_text",
            "head_dim": 256,
            "query_pre_attn_scalar": 64,
            "sliding_window": WINDOW,
            "tie_word_embeddings": True,
        },
        bounds=SCALED,
    ),
    Case(
        "few blocks of windows beside full layers",
        LLAMA
        | {"model_type": "gemma2", "head_dim": 256, "sliding_window": WINDOW}
        | {"query_pre_attn_scalar": 64, "tie_word_embeddings": True},
        bounds=SCALED,
        num_window_blocks=20,
    ),
    Case(
        "fp8 KV without tensor cores",
        LLAMA | {"num_key_value_heads": 2},
        bounds=COARSE,
        kv_cache_dtype="fp8",
    ),
    Case(
        "experts of Mixtral",
        LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
        bounds=ROUTED,
    ),
    Case(
        "images whose tokens see each other, also in windows",
        GEMMA_3,
        image=gemma_image,
    ),
)


def make_model(case: Case, path: Path) -> Path:
    """Write the model of a case to `path`, in bfloat16, and return `path`."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(0)
    fields = dict(case.fields)
    kind: Any = AutoModelForCausalLM if case.image is None else AutoModelForImageTextToText
    made = kind.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    for name, parameter in made.named_parameters():
        # With small norms behind each layer, the tied embedding would repeat each input token.
        if case.fields["model_type"].startswith("gemma") and "layernorm" in name:
            if "post" in name:
                torch.nn.init.constant_(parameter, 3.0)
        if "mm_input_projection" in name:  # else images are zeros
            torch.nn.init.normal_(parameter)
    made.bfloat16().save_pretrained(path)
    if case.has_tokenizer:
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(EMBEDDED / name, path)
    return path


def make_settings(
    path: Path,
    case: Case | None = None,
    *,
    pipeline_depth: int = 2,
    num_kv_blocks: int | None = None,
    max_num_seqs: int = 8,
    lora: Sequence[str] = (),
    **runner: Any,
) -> EngineConfig:
    """Return settings of a card that serves a case: in bfloat16, and with few KV blocks."""
    case = case or Case("", {})
    is_guessing = case.speculation.drafts_surely
    return EngineConfig(
        model=ModelConfig(
            model=str(path), dtype="bfloat16", skip_tokenizer_init=not case.has_tokenizer
        ),
        cache=CacheConfig(
            block_size=PAGE_SIZE,
            num_kv_blocks=num_kv_blocks or case.num_kv_blocks,
            kv_cache_dtype=case.kv_cache_dtype,
            num_window_blocks=case.num_window_blocks,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            pipeline_depth=1 if is_guessing else pipeline_depth,
            max_num_batched_tokens=None if case.num_window_blocks is None else 40,
        ),
        runner=RunnerConfig(**runner),
        speculation=case.speculation,
        adapters=AdapterConfig(lora=tuple(lora)),
    )


def make_asks(
    ways: Sequence[dict[str, Any]],
    count: int,
    *,
    longest: int = 90,
    num_tokens: int = 24,
    vocab_size: int = VOCAB_SIZE,
    case: Case | None = None,
) -> list[Ask]:
    """Return requests of random prompts of 1 to `longest` tokens, which ask for `ways` in turn. Two
    of three have images, if the model of a `case` sees.
    """
    rng, noise = random.Random(1), np.random.default_rng(1)
    asks = []
    for index in range(count):
        prompt = [rng.randrange(vocab_size) for _ in range(rng.randint(1, longest))]
        way = ways[index % len(ways)]
        is_free = "structured_outputs" not in way
        given = {"max_tokens": num_tokens, "seed": index, "logprobs": 0, "ignore_eos": is_free}
        params = SamplingParams(**{**given, "detokenize": not is_free, **way})
        images: list[EncoderInput] = []
        if case is not None and case.image is not None:
            for number in range(index % 3):
                size, arrays = case.image(noise)
                begin = len(prompt) + 1
                prompt += [7, *[IMAGE_TOKEN] * size, 8]
                is_whole = case.fields["model_type"] == "gemma3"
                name = f"image {number} of {index}"
                images.append(EncoderInput(begin, size, name, arrays, is_whole))
            prompt += prompt[:5]
        asks.append(Ask(prompt, params, images=images))
    return asks


# Serving it, and asking how likely what was said is.


def examine(
    case: Case, make_runner: Callable[[EngineConfig], RunnerInterface], folder: Path
) -> dict[str, Any]:
    """Serve a case by `make_runner` and have the CPU score it. Raises `WrongNumbersError`."""
    path = make_model(case, folder / "model")
    config = make_settings(path, case)
    vocab_size = case.fields.get("vocab_size", VOCAB_SIZE)
    asks = make_asks(case.ways, max(12, 3 * len(case.ways)), vocab_size=vocab_size, case=case)
    with every_draft_pays():
        replies, stats = asyncio.run(serve(config, make_runner(config), asks))
    check_stats(config, stats)
    scores = asyncio.run(score(on_cpu(path), None, replies))
    found = check_logprobs(replies, scores, case.bounds)
    check_choices(replies, scores, case.bounds.worst)
    return {**found, "preemptions": stats.num_preemptions, "drafts": stats.num_accepted_tokens}


def on_cpu(path: Path, **cache: Any) -> EngineConfig:
    """Return settings by which a CPU says in float32 how likely a model thinks texts are."""
    return EngineConfig(
        model=ModelConfig(model=str(path), dtype="float32", skip_tokenizer_init=True),
        cache=CacheConfig(block_size=PAGE_SIZE, num_kv_blocks=1024, **cache),
        scheduler=SchedulerConfig(max_num_seqs=8),
        runner=RunnerConfig(device="cpu", threads=1),
    )


async def serve(
    config: EngineConfig, runner: RunnerInterface | None, asks: Sequence[Ask]
) -> tuple[list[Reply], SchedulerStats]:
    """Return the replies to requests that all come at once."""
    async with AsyncEngine(config, runner=runner) as engine:

        async def one(ask: Ask) -> Reply:
            token_ids: list[int] = []
            entries: list[TokenLogprobs] = []
            of_prompt: list[float] = []
            text = ""
            stream = engine.generate(ask.and_then(()), ask.params, adapter=ask.adapter)
            async for output in stream:
                token_ids += output.token_ids
                entries += output.logprobs or ()
                text += output.text
                of_prompt += [e.logprob for e in output.prompt_logprobs or () if e is not None]
            return Reply(ask, token_ids, [entry.logprob for entry in entries], of_prompt, text)

        replies = await asyncio.gather(*map(one, asks))
        stats = engine.get_stats()
        assert stats is not None, "the scheduler keeps some"
        return replies, stats


async def score(
    config: EngineConfig, runner: RunnerInterface | None, replies: Sequence[Reply]
) -> list[list[TokenLogprobs]]:
    """Return how likely all tokens of prompts and replies are, but for the first of each."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=20, detokenize=False)
    async with AsyncEngine(config, runner=runner) as engine:

        async def one(reply: Reply) -> list[TokenLogprobs]:
            async for output in engine.generate(reply.ask.and_then(reply.token_ids), params):
                if output.prompt_logprobs:
                    return [entry for entry in output.prompt_logprobs if entry is not None]
            raise WrongNumbersError("a request got no log probabilities of its prompt")

        return await asyncio.gather(*map(one, replies))


@contextmanager
def every_draft_pays() -> Iterator[None]:
    """Inside the block drafts are made however long a step takes, so that there are some."""

    def stepped(self: DraftLength, num_rows: int, num_tokens: int, seconds: float) -> None:
        self.price = 1e-6

    kind: Any = DraftLength
    before = kind.stepped
    kind.stepped = stepped
    try:
        yield
    finally:
        kind.stepped = before


# What is wrong with it.


def check_stats(config: EngineConfig, stats: SchedulerStats) -> None:
    """Raise `WrongNumbersError` if what is to be tried has not happened."""
    wanted = config.cache.num_window_blocks
    if wanted is not None and stats.num_window_blocks != wanted:
        raise WrongNumbersError(
            f"layers with a window have {stats.num_window_blocks} blocks of their own, not {wanted}"
        )
    if not stats.num_preemptions:
        raise WrongNumbersError("no request was preempted: the KV pool is too large")
    if config.speculation.drafts_surely and not stats.num_accepted_tokens:
        raise WrongNumbersError(f"no draft of {stats.num_draft_tokens} was accepted")


def check_logprobs(
    replies: Sequence[Reply],
    scores: Sequence[Sequence[TokenLogprobs]],
    bounds: Bounds = BOUNDS,
) -> dict[str, Any]:
    """Compare what was said of the tokens with `scores`. Raises `WrongNumbersError`."""
    worst, where, total, count = 0.0, "no token", 0.0, 0
    for number, (reply, own) in enumerate(zip(replies, scores, strict=True)):
        begin = len(reply.ask.prompt) - 1
        pairs = [*zip(reply.of_prompt, own[:begin], strict=False)]
        pairs += zip(reply.logprobs, own[begin:], strict=True)
        for place, (logprob, entry) in enumerate(pairs):
            error = abs(logprob - entry.logprob)
            total, count = total + error, count + 1
            if not error <= worst:
                worst, where = error, f"token {place} of request {number}"
    mean = total / max(count, 1)
    if not (worst <= bounds.worst and mean <= bounds.mean):
        raise WrongNumbersError(
            f"log probabilities are off by {worst:.3g} at {where} and by {mean:.3g} in the mean; "
            f"{bounds.worst} and {bounds.mean} are allowed"
        )
    return {"worst": worst, "mean": mean}


def check_choices(
    replies: Sequence[Reply], scores: Sequence[Sequence[TokenLogprobs]], slack: float
) -> None:
    """Raise `WrongNumbersError` if a token was said that its request's settings do not allow, by
    log probabilities that are right to `slack`.
    """
    for number, (reply, own) in enumerate(zip(replies, scores, strict=True)):
        params, begin = reply.ask.params, len(reply.ask.prompt) - 1
        if params.prompt_logprobs is not None and len(reply.of_prompt) != begin:
            raise WrongNumbersError(
                f"request {number} got log probabilities of {len(reply.of_prompt)} tokens of its "
                f"prompt, not of {begin}"
            )
        if why := _why_not_text(reply) or next(
            filter(None, (_why_not(reply, *pair, slack) for pair in enumerate(own[begin:]))), ""
        ):
            raise WrongNumbersError(f"request {number}: {why}")


def _why_not_text(reply: Reply) -> str:
    """Return why a text does not match what its grammar asks for; "" if it does."""
    if (asked := reply.ask.params.structured_outputs) is None or asked.regex is None:
        return ""
    import regex

    # The reply may have been cut at its last token.
    if regex.fullmatch(asked.regex, reply.text, partial=True):
        return ""
    return f"{reply.text!r} does not match {asked.regex}"


def _why_not(reply: Reply, place: int, entry: TokenLogprobs, slack: float) -> str:
    """Return why the token at `place` is none that the request allows; "" if it is one."""
    params, token_id = reply.ask.params, reply.token_ids[place]
    if params.structured_outputs is not None:
        return ""
    said = reply.token_ids[:place]

    def is_allowed(token: int) -> bool:
        recent = (*said, token)
        if any(recent[-len(bad) :] == bad for bad in params.bad_words_ids):
            return False
        return not params.allowed_token_ids or token in params.allowed_token_ids

    def edited(token: int, logprob: float) -> float:
        count = said.count(token)
        logprob -= count * params.frequency_penalty + bool(count) * params.presence_penalty
        return logprob + (params.logit_bias or {}).get(token, 0.0)

    what = f"token {place}, {token_id}"
    if not is_allowed(token_id):
        return f"{what}, is forbidden"
    own = edited(token_id, entry.logprob)
    top = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
    rivals = [edited(token, logprob) for token, logprob in top if is_allowed(token)]
    if params.temperature == 0:
        better = max(rivals, default=own) - own
        return f"{what}, is by {better:.3g} less likely than another" if better > slack else ""
    ahead = [rival for rival in rivals if rival > own + slack]
    if 0 < params.top_k <= len(ahead):
        return f"{what}, is behind {len(ahead)} others, and top_k is {params.top_k}"
    if params.temperature == 1 and sum(map(math.exp, ahead)) >= params.top_p:
        return f"{what}, is behind {sum(map(math.exp, ahead)):.3g}, and top_p is {params.top_p}"
    if params.min_p and (max(ahead, default=own) - own - slack) / params.temperature > -math.log(
        params.min_p
    ):
        return f"{what}, is less likely than min_p allows"
    return ""
