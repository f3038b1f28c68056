"""Settings of the KV cache, and of what keeps blocks besides it."""

from typing import Annotated, Literal

from aioserve.config.section import PositiveFloat, PositiveInt, Section, doc


class CacheConfig(Section, frozen=True, kw_only=True):
    """Settings of the paged KV cache."""

    block_size: Annotated[PositiveInt, doc("KV cache block size in tokens")] = 16
    num_kv_blocks: Annotated[
        PositiveInt | None, doc("KV cache size in blocks (default: from --kv-cache-gib)")
    ] = None
    kv_cache_gib: Annotated[
        PositiveFloat | None,
        doc(
            "KV cache limit in GiB; memory is taken as the cache fills (default on a CPU: twice "
            "the weights in --dtype, but 0.25 and one request of max_model_len at least, and at "
            "most 4, a quarter of what is free, and what max_num_seqs requests can use)"
        ),
    ] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8", "int8"],
        doc(
            "KV cache type; auto: the compute type; int8 (CPU) or fp8 (CUDA) halves the cache of a "
            "16-bit model"
        ),
    ] = "auto"
    enable_prefix_caching: Annotated[
        bool, doc("prefix caching: reuse KV blocks of equal prompt prefixes")
    ] = True
    kv_connector: Annotated[
        Literal["none", "memory", "disk"],
        doc(
            "KV offloading; memory: blocks that the KV cache evicts are kept in host memory; disk: "
            "all computed blocks are written to a directory that engines can share"
        ),
    ] = "none"
    kv_connector_gib: Annotated[
        PositiveFloat, doc("KV offloading: limit of host memory in GiB, taken as it fills")
    ] = 1.0
    kv_connector_path: Annotated[
        str | None, doc("KV offloading: directory of --kv-connector disk")
    ] = None
    kv_connector_disk_gib: Annotated[
        PositiveFloat,
        doc(
            "KV offloading: limit of that directory in GiB, for all engines that share it; the "
            "oldest blocks are deleted first"
        ),
    ] = 10.0
    kv_role: Annotated[
        Literal["both", "producer", "consumer"],
        doc(
            "KV offloading: whether this engine writes blocks to the connector (producer), reads "
            "them (consumer), or both"
        ),
    ] = "both"
    num_state_slots: Annotated[
        PositiveInt | None,
        doc(
            "state slots for state-space, linear-attention and convolution layers: one per running "
            "request, the rest for cached prefixes (default: as many as fit, at most three times "
            "max_num_seqs)"
        ),
    ] = None
    num_window_blocks: Annotated[
        PositiveInt | None,
        doc(
            "KV blocks of sliding-window layers, which have a pool of their own (default: a share "
            "of the memory that serves as many requests as the other pool)"
        ),
    ] = None
    watermark: Annotated[
        float, doc("share of the KV cache that stays free when a request is admitted", ge=0, lt=1)
    ] = 0.01
