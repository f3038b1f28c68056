"""aioserve's policies in vLLM, and vLLM's scheduler in the lab. Needs vLLM; see docs/vllm.md."""
