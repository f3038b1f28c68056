"""An executor on the fake device: two kinds of attention with random weights."""

from typing import Any

import torch
from torch import Tensor

from aioserve.gpu.cuda import sampler
from aioserve.gpu.cuda.attention import DeviceAttention, TorchDeviceAttention
from aioserve.gpu.cuda.executor import StepExecutor
from aioserve.gpu.cuda.flashinfer_attention import FlashInferAttention
from aioserve.gpu.cuda.plan import Layout, Limits, WindowLimits
from aioserve.gpu.cuda.sampler import DeviceSampler
from aioserve.kv_cache import WindowSpec
from aioserve.runner.adapters import AdapterSites, TokenAdapters
from aioserve.runner.attention.backend import (
    AttentionCall,
    AttentionOptions,
    KVCacheSpec,
    LayerAttention,
    LayerSpec,
    ModelInputs,
)
from aioserve.runner.load_plan import BatchParts
from aioserve.runner.served_model import Halves, ServedModel
from tests.runner.cuda.fake_device import FakeDevice
from tests.runner.cuda.fake_flashinfer import FakeFlashInfer

VOCAB_SIZE, HIDDEN, NUM_HEADS, HEAD_DIM = 40, 16, 2, 8
SPEC = KVCacheSpec(
    (LayerSpec(1, HEAD_DIM, HEAD_DIM), LayerSpec(1, HEAD_DIM, HEAD_DIM)), torch.float32
)
WINDOW = 6
CALLS = (
    AttentionCall(NUM_HEADS, AttentionOptions(0.3)),
    AttentionCall(NUM_HEADS, AttentionOptions(0.5, sliding_window=WINDOW, softcap=4.0)),
)


class TinyModel(ServedModel, Halves):
    """Tokens depend on all that came before, in their order."""

    def __init__(self) -> None:
        self.name, self.kv_cache_spec = "tiny", SPEC
        generator = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.embedding, self.places = weight(VOCAB_SIZE, HIDDEN), weight(128, HIDDEN)
        self.qkv = weight(2, HIDDEN, (NUM_HEADS + 2) * HEAD_DIM)
        self.head = weight(HIDDEN, VOCAB_SIZE)
        self.adapter_sites = AdapterSites(
            find=lambda name: None,
            dtype=torch.float32,
            device=torch.device("cpu"),
            table_shape=None,
            rows_of_table=lambda ids: ids,
            head=self.logits,
            is_table=lambda name: False,
        )

    def forward(self, inputs: ModelInputs, attention: LayerAttention) -> Tensor:
        return self.logits(self.hidden(inputs, attention))

    @property
    def halves(self) -> Halves:
        return self

    def hidden(self, inputs: ModelInputs, attention: LayerAttention) -> Tensor:
        x = self.embedding[inputs.input_ids] + self.places[inputs.positions]
        for layer, call in enumerate(CALLS):
            qkv = (x @ self.qkv[layer]).view(len(x), -1, HEAD_DIM)
            query, key, value = qkv.split((NUM_HEADS, 1, 1), dim=1)
            attended = attention.forward(layer, query, key, value, call.options)
            x = x + attended.flatten(1)
        return x[inputs.logits_rows]

    def logits(self, hidden: Tensor, adapters: TokenAdapters | None = None) -> Tensor:
        return hidden @ self.head


def make_executor(
    device: FakeDevice,
    *,
    is_flashinfer: bool = False,
    sizes: tuple[int, ...] = (),
    windows: WindowSpec | None = None,
    **changes: Any,
) -> StepExecutor:
    """With the stand-in of flashinfer, "graphs" of some sizes, and pages of their own for the layer
    with a window, if asked.
    """
    if windows is not None:
        changes["windows"] = WindowLimits(frozenset({1}), windows.num_tokens, windows.num_blocks)
    limits = Limits(
        **{"num_rows": 8, "num_tokens": 64, "num_row_pages": 17, "page_size": 4, "num_pages": 64}
        | changes
    )
    layout, max_model_len = Layout(limits), limits.num_row_pages * limits.page_size - 1
    arena = torch.zeros(layout.size, dtype=torch.int32)
    attention: DeviceAttention = TorchDeviceAttention(SPEC, limits, device.torch_device)
    if is_flashinfer:
        attention = FlashInferAttention(
            FakeFlashInfer(device, arena),
            SPEC,
            CALLS,
            limits,
            device,
            torch.float32,
            max_model_len=max_model_len,
            capture_sizes=sizes,
            arrays=layout.split(arena),
        )
    model = TinyModel()
    executor = StepExecutor(
        device,
        model,
        attention,
        DeviceSampler(device, limits.num_rows, limits.num_samples, VOCAB_SIZE, sampler.draw),
        layout,
        arena,
        BatchParts(
            model,
            limits.num_rows,
            max_model_len,
            limits.page_size,
            VOCAB_SIZE,
            windows=windows,
        ),
        windows=windows,
    )
    executor.capture(sizes)
    return executor
