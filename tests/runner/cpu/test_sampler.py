"""Sampling against slow plain references, one row at a time."""

import math
import os
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from aioserve.kernels import load_kernels, usable_variants
from aioserve.kernels.tokens import LogitMaxima, load_chooser
from aioserve.outputs import TokenLogprobs
from aioserve.params import SamplingParams
from aioserve.runner.batch import sampling_columns
from aioserve.runner.batch.sampling_columns import SamplingColumns, SamplingInputs
from aioserve.runner.cpu import sampler
from aioserve.scheduler.output import NewRequestData

# Where kernels serve, a library that is stale or was not built is a failure.
needs_kernels = pytest.mark.skipif(
    not usable_variants() or os.environ.get("AIOSERVE_KERNELS") == "off",
    reason="no kernels serve here",
)
VOCAB = 300
GOLDEN_WORDS = [
    [552929223, 3378783205, 295159321]
]  # seed 1 + 2 * 2**32, position 3, tokens 0, 1, 50000


def make_logits(num_rows: int, seed: int = 0, vocab_size: int = VOCAB) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * 3


def sample(
    logits: torch.Tensor,
    params: list[SamplingParams],
    token_ids: list[list[int]] | None = None,
    num_prompt_tokens: int = 1,
    stop_token_ids: frozenset[int] = frozenset(),
) -> tuple[list[int], dict[int, TokenLogprobs]]:
    """One step of rows with these known tokens (default: one prompt token)."""
    token_ids = token_ids or [[0]] * len(params)
    columns = SamplingColumns(len(params), logits.shape[1])
    for row, (row_params, ids) in enumerate(zip(params, token_ids, strict=True)):
        request = NewRequestData(
            str(row), ids, num_prompt_tokens, row_params, stop_token_ids, [], 0
        )
        columns.set(row, request)
    lengths = np.array([len(ids) for ids in token_ids])
    result = sampler.sample(logits, columns.select(np.arange(len(params)), lengths))
    return result.token_ids.tolist(), result.logprobs


def reference_edits(
    row: torch.Tensor, params: SamplingParams, prompt: list[int], output: list[int], stops: set[int]
) -> list[float]:
    """Penalties, bias and min_tokens, token by token."""
    logits = row.tolist()
    for token in range(len(logits)):
        if token in prompt or token in output:
            factor = params.repetition_penalty
            logits[token] = logits[token] * factor if logits[token] < 0 else logits[token] / factor
        count = output.count(token)
        logits[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
        logits[token] += (params.logit_bias or {}).get(token, 0.0)
        for *before, last in params.bad_words_ids:
            if last == token and output[len(output) - len(before) :] == before:
                logits[token] -= 1e30
        if len(output) < params.min_tokens and token in stops:
            logits[token] = -math.inf
        if params.allowed_token_ids and token not in params.allowed_token_ids:
            logits[token] = -math.inf
    return logits


def reference_kept(logits: list[float], params: SamplingParams) -> set[int]:
    """Tokens that temperature, top-k, top-p and min-p leave."""
    scaled = sorted(((x / params.temperature, i) for i, x in enumerate(logits)), reverse=True)
    if params.top_k > 0:
        scaled = scaled[: params.top_k]
    highest = scaled[0][0]
    weights = [(math.exp(x - highest), i) for x, i in scaled]
    total = sum(weight for weight, _ in weights)
    kept: list[tuple[float, int]] = []
    mass = 0.0
    for weight, token in weights:
        if kept and mass >= params.top_p * total:
            break
        mass += weight
        kept.append((weight, token))
    return {token for weight, token in kept if weight >= params.min_p * kept[0][0]}


def reference_choice(logits: list[float], params: SamplingParams, position: int) -> int:
    """The Gumbel-max draw with scalar integer arithmetic."""

    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        x ^= x >> 15
        x = x * 0x846CA68B % 2**32
        return x ^ (x >> 16)

    seed = params.seed or 0
    key = mix((seed + 0x9E3779B9) % 2**32)
    key0 = mix((mix(key ^ (seed >> 32) % 2**32) + position) % 2**32)
    key1 = mix((key0 + 0x9E3779B9) % 2**32)

    def score(token: int) -> float:
        word = mix(mix((token + key0) % 2**32) ^ key1)
        uniform = ((word >> 9) + 0.5) / 2**23
        return logits[token] / params.temperature - math.log(-math.log(uniform))

    return max(reference_kept(logits, params), key=score)


def test_greedy_rows_take_the_first_best_token() -> None:
    logits = make_logits(5)
    logits[2, 7] = logits[2, 200] = 99.0
    tokens, logprobs = sample(logits, [SamplingParams(temperature=0)] * 5)
    assert tokens == logits.argmax(dim=1).tolist()
    assert tokens[2] == 7
    assert logprobs == {}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 1e-30},
        {"temperature": 1e-50},
        {"top_p": 1e-50},
        {"temperature": 2.0, "top_k": 30, "top_p": 1e-300},
        {"temperature": 1.9, "top_k": 5},
        {"top_k": 1},
        {"top_k": VOCAB + 10},
        {"top_k": -1, "top_p": 0.7},
        {"top_p": 1e-6},
        {"temperature": 2.0, "top_p": 0.95},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"temperature": 1.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1},
    ],
)
def test_each_choice_equals_the_reference(fields: dict[str, Any]) -> None:
    logits = make_logits(40)
    params = [SamplingParams(seed=row * 0x1234567890AB - 5, **fields) for row in range(40)]
    lengths = [1 + row % 7 for row in range(40)]
    tokens, _ = sample(logits, params, [[0] * length for length in lengths])
    expected = [
        reference_choice(row.tolist(), p, length)
        for row, p, length in zip(logits, params, lengths, strict=True)
    ]
    assert tokens == expected


@pytest.mark.parametrize("temperature", [0.0, 1.3])
@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.8},
        {"repetition_penalty": 0.5},
        {"presence_penalty": 1.5},
        {"frequency_penalty": -2.0},
        {"logit_bias": {3: 100.0, 4: -100.0, 9: 2.5}},
        {"min_tokens": 30, "max_tokens": 40},
        {"allowed_token_ids": tuple(range(7, 60))},
        {"bad_words_ids": tuple((i,) for i in range(0, VOCAB, 2))},
        {"bad_words_ids": tuple((i, j) for i in range(5) for j in range(0, VOCAB, 3))},
        {"allowed_token_ids": (3, 4, 5), "bad_words_ids": ((3,), (5, 4), (6, 7, 4), (1, 4))},
        {
            "repetition_penalty": 1.3,
            "presence_penalty": -1.0,
            "frequency_penalty": 0.7,
            "logit_bias": {5: 4.0},
            "min_tokens": 2,
            "top_p": 0.9,
        },
    ],
)
def test_edits_equal_the_reference(fields: dict[str, Any], temperature: float) -> None:
    chance = random.Random(0)
    logits = make_logits(30, seed=3)
    prompts = [[chance.randrange(VOCAB) for _ in range(6)] for _ in range(30)]
    outputs = [[chance.randrange(20) for _ in range(chance.randrange(25))] for _ in range(30)]
    stops = {int(row.argmax()) for row in logits}
    params = [SamplingParams(temperature=temperature, seed=n, **fields) for n in range(30)]
    known = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    tokens, _ = sample(logits, params, known, 6, frozenset(stops))
    for row in range(30):
        edited = reference_edits(logits[row], params[row], prompts[row], outputs[row], stops)
        if temperature:
            expected = reference_choice(edited, params[row], len(known[row]))
        else:
            expected = max(range(VOCAB), key=edited.__getitem__)
        assert tokens[row] == expected


def test_repetition_penalty_equals_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = make_logits(4)
    known = [[row, 5, 5, 250] for row in range(4)]
    processed = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor(known), logits.clone())
    tokens, _ = sample(
        logits, [SamplingParams(temperature=0, repetition_penalty=1.7)] * 4, known, 2
    )
    assert tokens == processed.argmax(dim=1).tolist()


def test_penalties_count_tokens_as_they_are_sampled() -> None:
    columns = SamplingColumns(1, VOCAB)
    params = SamplingParams(temperature=0, frequency_penalty=1.0)
    columns.set(0, NewRequestData("a", [7], 1, params, frozenset(), [], 0))
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 8] = 2.5, 1.0
    chosen = []
    for length in range(1, 5):
        inputs = columns.select(np.array([0]), np.array([length]))
        token_ids = sampler.sample(logits, inputs).token_ids
        columns.append(np.array([0]), [token_ids.tolist()], {})
        chosen += token_ids.tolist()
    assert chosen == [7, 7, 8, 7]


def test_a_bad_word_is_never_said_to_its_end_unless_nothing_else_is_allowed() -> None:
    columns = SamplingColumns(2, VOCAB)
    bad = ((7, 7, 7), (7, 8))
    for row, allowed in enumerate([(), (7,)]):
        params = SamplingParams(temperature=0, bad_words_ids=bad, allowed_token_ids=allowed)
        columns.set(row, NewRequestData(str(row), [7, 7], 2, params, frozenset(), [], 0))
    logits = torch.zeros(2, VOCAB)
    logits[:, 7:10] = torch.tensor([3.0, 2.0, 1.0])
    rows, chosen = np.arange(2), []
    for length in range(2, 8):
        inputs = columns.select(rows, np.full(2, length))
        token_ids = sampler.sample(logits, inputs).token_ids
        columns.append(rows, token_ids[:, None].tolist(), {})
        chosen.append(token_ids.tolist())
    assert [list(said) for said in zip(*chosen, strict=True)] == [[7, 7, 9, 7, 7, 9], [7] * 6]


def test_stop_tokens_are_masked_until_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 2] = 10.0
    params = SamplingParams(temperature=0, min_tokens=2)
    for num_output, expected in [(0, 0), (1, 0), (2, 2)]:
        tokens, _ = sample(logits, [params], [[1] * (3 + num_output)], 3, frozenset({2, VOCAB + 5}))
        assert tokens == [expected]


def test_same_seed_and_logits_give_the_same_token_in_any_row_and_company() -> None:
    logits = make_logits(1)
    wanted = SamplingParams(seed=11, temperature=1.5, top_p=0.9)
    alone, _ = sample(logits, [wanted])
    others = [
        SamplingParams(temperature=0),
        SamplingParams(seed=1),
        SamplingParams(seed=2, top_k=250),
        SamplingParams(seed=11, temperature=1.5, top_p=0.9, logprobs=2),
    ]
    for row in range(len(others) + 1):
        params = [*others[:row], wanted, *others[row:]]
        tokens, _ = sample(logits.repeat(len(params), 1), params)
        assert tokens[row] == alone[0]


def test_equal_logits_are_cut_the_same_way_in_any_company() -> None:
    # bfloat16 logits have many equals; how they are sorted depends on how many are sorted
    logits = make_logits(1, vocab_size=3000).bfloat16().float().round()
    for fields in ({"top_k": 4}, {"top_p": 0.5}):
        wanted = [SamplingParams(seed=seed, **fields) for seed in range(20)]
        alone = [sample(logits, [params])[0][0] for params in wanted]
        crowd = [*wanted, SamplingParams(seed=0, top_k=2500), SamplingParams(seed=0, top_p=0.999)]
        tokens, _ = sample(logits.repeat(len(crowd), 1), crowd)
        assert tokens[:20] == alone


def test_top_p_sorts_further_when_the_mass_is_spread_wide() -> None:
    logits = make_logits(1, vocab_size=5000) * 0.01
    params = [SamplingParams(seed=seed, top_p=0.9) for seed in range(50)]
    tokens, _ = sample(logits.repeat(50, 1), params)
    assert tokens == [reference_choice(logits[0].tolist(), p, 1) for p in params]


@pytest.mark.parametrize("fields", [{}, {"top_k": 6}, {"top_p": 0.8}])
def test_draws_follow_the_distribution(fields: dict[str, Any]) -> None:
    num_draws, vocab_size = 20_000, 12
    logits = torch.linspace(-2, 2, vocab_size)
    kept = reference_kept(logits.tolist(), SamplingParams(**fields))
    params = [SamplingParams(seed=seed, **fields) for seed in range(num_draws)]
    tokens, _ = sample(logits.expand(num_draws, -1), params)
    expected = {token: math.exp(logits[token].item()) for token in kept}
    scale = num_draws / sum(expected.values())
    counts = Counter(tokens)
    assert set(counts) <= kept
    chi_square = sum((counts[t] - e * scale) ** 2 / (e * scale) for t, e in expected.items())
    assert chi_square < 3 * len(kept)  # mean len - 1, deviation sqrt(2 (len - 1))


def test_noise_of_neighbouring_seeds_and_positions_is_uncorrelated() -> None:
    seeds = np.array(
        [sampling_columns.seed_words(seed) for seed in (5, 5, 6, 5 + 2**32)], dtype=np.uint32
    )
    keys = sampling_columns.row_keys(seeds, np.array([9, 10, 9, 9]))
    uniform = sampling_columns.uniform(
        sampling_columns.hash_tokens(keys, np.arange(50_000, dtype=np.uint32))
    )
    assert ((uniform > 0) & (uniform < 1)).all()
    assert abs(uniform.mean(axis=1) - 0.5).max() < 0.01
    assert np.abs(np.corrcoef(uniform) - np.eye(4)).max() < 0.02


def test_noise_bits_never_change() -> None:
    keys = sampling_columns.row_keys(np.array([[1, 2]], dtype=np.uint32), np.array([3]))
    words = sampling_columns.hash_tokens(keys, np.array([0, 1, 50_000], dtype=np.uint32))
    assert words.tolist() == GOLDEN_WORDS


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = make_logits(4)
    params = [
        SamplingParams(temperature=0, logprobs=0),
        SamplingParams(seed=3, temperature=2.0, logprobs=5, logit_bias={9: 100.0}),
        SamplingParams(temperature=0),
        SamplingParams(seed=3, top_k=3, logprobs=20),
    ]
    tokens, logprobs = sample(logits, params)
    assert list(logprobs) == [0, 1, 3]
    assert tokens[1] == 9
    for row, entry in logprobs.items():
        expected = torch.log_softmax(logits[row], dim=0)
        assert entry.logprob == pytest.approx(expected[tokens[row]].item(), abs=1e-5)
        assert entry.rank == 1 + int((expected > expected[tokens[row]]).sum())
        best = expected.sort(descending=True)
        num_top = params[row].logprobs or 0
        assert entry.top_token_ids == best.indices[:num_top].tolist()
        assert entry.top_logprobs == pytest.approx(best.values[:num_top].tolist(), abs=1e-5)


def test_bfloat16_logits_are_not_changed() -> None:
    logits = make_logits(3).bfloat16()
    before = logits.clone()
    sample(logits, [SamplingParams(seed=1, repetition_penalty=1.5, logprobs=1)] * 3)
    assert torch.equal(logits, before)


def test_no_rows_is_no_tokens() -> None:
    assert sample(make_logits(0), []) == ([], {})


def tokens_of_many_kinds() -> list[list[int]]:
    """Rows as a model has them and flat ones, with and without equals, drawn in every way."""
    fields: list[dict[str, Any]] = [
        {"temperature": 0},
        {},
        {"temperature": 0.6},
        {"top_p": 0.9},
        {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
        {"top_k": 50},
        {"temperature": 1.4, "top_k": 300, "top_p": 0.99},
        {"min_p": 0.05, "temperature": 1.5},
        {"top_p": 0.3, "min_p": 0.01},
        {"logit_bias": {5: 3.0}, "top_k": 10},
    ]
    found = []
    for scale, seed in ((4.0, 1), (0.1, 2)):
        logits = make_logits(6 * len(fields), seed=seed, vocab_size=20_011) * scale
        for given in (logits, logits.bfloat16()):
            params = [SamplingParams(seed=n, **own) for n, own in enumerate(6 * fields)]
            found.append(sample(given, params)[0])
    return found


@needs_kernels
def test_tokens_are_the_same_without_the_compiled_library(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_chooser() is not None
    expected = tokens_of_many_kinds()
    try:
        with monkeypatch.context() as without:
            without.setenv("AIOSERVE_KERNELS", "off")
            load_kernels.cache_clear()
            load_chooser.cache_clear()
            assert load_chooser() is None
            assert tokens_of_many_kinds() == expected
    finally:
        load_kernels.cache_clear()
        load_chooser.cache_clear()


@needs_kernels
def test_the_compiled_library_leaves_no_row_open_that_rounding_does_not_decide() -> None:
    logits, rows = make_logits(200, vocab_size=5000), 200
    inputs = replace(
        SamplingInputs.neutral(rows),
        temperature=np.full(rows, 0.8, dtype=np.float32),
        top_k=np.arange(rows) % 4 * 30,
        top_p=np.tile(np.array([1.0, 0.9], dtype=np.float32), rows // 2),
        seeds=np.arange(2 * rows, dtype=np.uint32).reshape(rows, 2),
        num_tokens=np.arange(rows),
    )
    chooser = load_chooser()
    assert chooser is not None
    chosen = chooser.choose(logits, inputs.draws)
    assert chosen.best is None
    assert chosen.is_open is None or chosen.is_open.sum() < 3


@pytest.mark.parametrize("has_library", [True, False])
def test_a_greedy_row_alone_has_the_token_or_the_failure_that_it_has_among_others(
    has_library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_library:
        monkeypatch.setattr(sampler, "load_chooser", lambda: None)
    logits = make_logits(9)
    logits[1] = -torch.inf
    logits[2, 7] = logits[2, 9] = torch.inf
    logits[3, 200] = logits[3, 8] = torch.nan
    logits[4, [5, 250]] = logits[4].max() + 1  # equals
    logits[5, VOCAB - 1] = 1e30
    params = SamplingParams(temperature=0)
    columns = SamplingColumns(len(logits), VOCAB)
    for row in range(len(logits)):
        columns.set(row, NewRequestData(str(row), [0], 1, params, frozenset(), [], 0))
    rows, lengths = np.arange(len(logits)), np.ones(len(logits), dtype=np.int64)
    together = sampler.sample(logits, columns.select(rows, lengths))
    assert together.token_ids[[4, 5]].tolist() == [5, VOCAB - 1]
    assert list(together.failed) == [1, 2, 3]
    for row in range(len(logits)):
        own = columns.select(rows[row : row + 1], lengths[:1])
        alone = sampler.sample(logits[row : row + 1], own)
        assert alone.failed.get(0) == together.failed.get(row)
        if row not in together.failed:
            assert alone.token_ids.tolist() == [together.token_ids[row]]


def noted(logits: torch.Tensor, width: int) -> torch.Tensor:
    """Return the same logits with their maxima behind them, as a head writes both."""
    rows, size = logits.shape
    num = -(-size // width)
    memory = torch.empty(rows * (size + num))
    padded = torch.nn.functional.pad(logits, (0, -size % width), value=-torch.inf)
    memory[rows * size :] = padded.view(rows, num, width).amax(-1).T.flatten()
    found = memory[: rows * size].view(rows, size).copy_(logits)
    LogitMaxima.attach(found, width)
    return found


def columns_of(params: list[SamplingParams], vocab_size: int) -> SamplingInputs:
    columns = SamplingColumns(len(params), vocab_size)
    for row, own in enumerate(params):
        columns.set(row, NewRequestData(str(row), [0], 1, own, frozenset(), [], 0))
    return columns.select(np.arange(len(params)), np.ones(len(params), dtype=np.int64))


WAYS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"temperature": 0}],
    "drawn": [
        {"temperature": 0},
        {},
        {"top_k": 50},
        {"top_p": 0.9},
        {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
        {"temperature": 1.4, "top_k": 300, "top_p": 0.99},
        {"min_p": 0.05, "temperature": 1.5},
    ],
    "edited": [{"temperature": 0}, {"temperature": 0, "logit_bias": {0: 100.0}}, {"top_p": 0.9}],
}


@pytest.mark.parametrize("has_library", [True, False])
@pytest.mark.parametrize("width", [8, 16, 32])
@pytest.mark.parametrize("way", WAYS)
def test_maxima_that_a_head_has_noted_change_no_token(
    way: str, width: int, has_library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_library:
        monkeypatch.setattr(sampler, "load_chooser", lambda: None)
    for vocab_size, rows in ((1, 3), (width, 17), (300, 1), (300, 40), (20_011, 35)):
        logits = make_logits(rows, vocab_size=vocab_size)
        logits[::7] = logits[::7].round()  # with many equals
        logits[3::9] = -torch.inf
        logits[4::9, vocab_size // 2] = torch.nan
        logits[5::9, vocab_size // 3 :: 3] = torch.inf
        logits[6::9] /= -torch.inf  # zeros of both signs
        logits[7::9, :-1] = -torch.inf
        logits[7::9, vocab_size // 3] = torch.inf  # in the same stretch
        params = [
            SamplingParams(seed=row, **WAYS[way][row % len(WAYS[way])]) for row in range(rows)
        ]
        inputs = columns_of(params, vocab_size)
        expected = sampler.sample_each(logits, inputs, None)
        found = sampler.sample_each(noted(logits, width), inputs, None)
        assert found.failed == expected.failed
        assert found.token_ids.tolist() == expected.token_ids.tolist()


@needs_kernels
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_where_maxima_are_noted_most_logits_are_not_read(rows: int) -> None:
    """What is changed behind the back of the maxima is not seen; a copy has none, and sees it."""
    for params in ({"temperature": 0}, {"temperature": 0.5, "top_k": 2}):
        logits = make_logits(rows, vocab_size=20_011)
        logits[:, 5000], logits[:, 5001] = 100.0, 99.0
        own = noted(logits, 32)
        own[:, 6000] = 200.0
        inputs = columns_of([SamplingParams(seed=3, **params)] * rows, 20_011)
        assert set(sampler.sample(own, inputs).token_ids.tolist()) <= {5000, 5001}
        assert sampler.sample(own.clone(), inputs).token_ids.tolist() == [6000] * rows
        assert sampler.sample(own[:1], inputs.take(np.arange(1))).token_ids.tolist() == [6000]


@needs_kernels
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_a_best_logit_that_is_gone_is_looked_for_in_all_of_its_row(rows: int) -> None:
    logits = make_logits(rows, vocab_size=300)
    logits[:, 299] = 100.0  # in the last stretch: behind it lies another row, or nothing
    own = noted(logits, 32)
    own[:, 299] = -100.0
    inputs = columns_of([SamplingParams(temperature=0)] * rows, 300)
    assert sampler.sample(own, inputs).token_ids.tolist() == own.argmax(-1).tolist()
