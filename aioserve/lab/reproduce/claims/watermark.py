"""Free blocks that admissions leave alone make preemptions rarer (vllm#44594)."""

from collections.abc import Sequence

from aioserve.lab.reproduce.claims.claim import Claim, Finding
from aioserve.lab.reproduce.claims.simulate import configure, make_workload, measure
from aioserve.lab.simulation.run import Progress

# Qwen2.5-7B on a GB200, computed: 15 GB of weights and 57 kB of KV per token at 6.5 TB/s, 15 GFLOP
# per token at 1,200 TFLOP/s, and what a host adds to each step and row.
STEPS = {
    "step_base_ms": 6.0,
    "step_prefill_token_us": 14.0,
    "step_decode_us": 15.0,
    "step_context_token_us": 0.009,
}
BLOCKS = 299_584 // 16
#: By watermark: preemptions and output tokens a second.
PUBLISHED = {
    0.0: (1065, 11582),
    0.02: (400, 12134),
    0.05: (187, 12167),
    0.10: (168, 11835),
}
SPEC = {
    "arrivals": {"kind": "closed", "clients": 128},
    "num_requests": 450,
    "classes": [
        {
            "name": "random",
            "prompt": {"kind": "uniform", "min": 800, "max": 1200},
            "output": {"kind": "uniform", "min": 4000, "max": 6000},
        }
    ],
}


def _run(seeds: Sequence[int], progress: Progress) -> list[Finding]:
    def outcome(watermark: float, seed: int) -> tuple[float, float]:
        config = configure(
            "chunked_prefill",
            STEPS,
            scheduler__options={"chunk_size": 8192},
            scheduler__max_num_seqs=256,
            scheduler__max_num_batched_tokens=8192,
            cache__num_kv_blocks=BLOCKS,
            cache__enable_prefix_caching=False,
            cache__watermark=watermark,
            model__max_model_len=8192,
        )
        totals = measure(config, make_workload(SPEC, seed, "random"), progress).totals
        return totals["preemptions"], totals["output_tokens_per_second"]

    runs = {share: [outcome(share, seed) for seed in seeds] for share in PUBLISHED}
    base = PUBLISHED[0.0]
    findings = [
        Finding(
            "preemptions without a watermark",
            (base[0], base[0]),
            [run[0] for run in runs[0.0]],
            is_ratio=False,
        )
    ]
    for share, published in PUBLISHED.items():
        if not share:
            continue
        for i, what in enumerate(("preemptions", "output tokens/s")):
            values = [a[i] / b[i] for a, b in zip(runs[share], runs[0.0], strict=True)]
            ratio = published[i] / base[i]
            findings.append(Finding(f"{what}, watermark {share:g} / none", (ratio, ratio), values))
    return findings


CLAIM = Claim(
    name="watermark",
    title="A few free blocks that admissions leave alone make preemptions rarer",
    source="vllm#44594, a merged pull request, 2026",
    setting="Qwen2.5-7B on a GB200 with vLLM, 299,584 tokens of KV cache, prefix caching off, "
    "450 requests of 800 to 1,200 tokens with replies of 4,000 to 6,000, 128 at a time.",
    here="The same numbers; step times are computed. This engine admits a prompt only if all"
    " of it fits, where vLLM admits its first chunk.",
    run=_run,
)
