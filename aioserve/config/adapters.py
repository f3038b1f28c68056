"""The settings of LoRA adapters: which are served, how many, and up to which rank."""

from typing import Annotated

from aioserve.config.section import PositiveInt, Section, doc


class AdapterConfig(Section, frozen=True, kw_only=True):
    """LoRA adapters: PEFT directories that are served as models, beside the one they adapt."""

    lora: Annotated[
        tuple[str, ...], doc("LoRA adapter to load at start, NAME=PATH; repeatable")
    ] = ()
    max_lora_rank: Annotated[int, doc("largest rank of a LoRA adapter", ge=1, le=256)] = 256
    max_cpu_loras: Annotated[
        PositiveInt,
        doc(
            "LoRA adapters kept in memory; beyond that the least recently used one is evicted and "
            "read again on demand"
        ),
    ] = 32
