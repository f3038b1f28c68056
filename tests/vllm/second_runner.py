"""vLLM's second model runner under vLLM's own scheduler and under aioserve's: the same replies?

    VLLM_USE_V2_MODEL_RUNNER=1 python -m tests.vllm.second_runner asynchronous 6

It is the usual one on a card. Its kernels are Triton's, which are interpreted here; so this is a
process of its own, with few requests. The last line is JSON.
"""

import json
import sys

from tests.vllm.inside import TIGHT, a_load, check_equal, check_over, exchange, make_engine, serve

#: A pool in which a request of six is preempted.
TIGHTER = TIGHT | {"num_gpu_blocks_override": 16}


def main(kind: str, count: int) -> None:
    """Serve a load under both. Raises `AssertionError` if a reply or a rule is not kept."""
    llm = make_engine(asynchronous=kind == "asynchronous", **TIGHTER)
    assert llm.llm_engine.vllm_config.use_v2_model_runner
    load = a_load(count, samples=False, prompt_logprobs=False)  # the interpreter knows no `top_k`
    theirs = serve(llm, load, aborts=False)
    scheduler = exchange(llm, policy="chunked_prefill", check=True)
    check_equal(serve(llm, load, aborts=False), theirs)
    check_over(scheduler)
    stats = scheduler.policy.make_stats()
    told = {"replies": len(theirs.replies), "preempted": stats.num_preemptions}
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
