"""An executor on the fake device: one layer of attention with random weights."""

from typing import Any

import torch
from fake_device import FakeDevice
from torch import Tensor

from aioserve.runner.attention.backend import KVCacheSpec, LayerAttention, LayerSpec
from aioserve.runner.cuda import draw
from aioserve.runner.cuda.attention import TorchDeviceAttention
from aioserve.runner.cuda.executor import StepExecutor
from aioserve.runner.cuda.models import DeviceModel
from aioserve.runner.cuda.plan import Limits

VOCAB_SIZE, HIDDEN, NUM_HEADS, HEAD_DIM = 40, 16, 2, 8
SPEC = KVCacheSpec((LayerSpec(1, HEAD_DIM, HEAD_DIM),), torch.float32)


class TinyModel(DeviceModel):
    """Tokens depend on all that came before, in their order."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(VOCAB_SIZE, HIDDEN, generator=generator)
        self.places = torch.randn(128, HIDDEN, generator=generator)
        self.qkv = torch.randn(HIDDEN, (NUM_HEADS + 2) * HEAD_DIM, generator=generator)
        self.head = torch.randn(NUM_HEADS * HEAD_DIM + HIDDEN, VOCAB_SIZE, generator=generator)

    def forward(
        self, input_ids: Tensor, positions: Tensor, logits_rows: Tensor, attention: LayerAttention
    ) -> Tensor:
        x = self.embedding[input_ids] + self.places[positions]
        qkv = (x @ self.qkv).view(len(x), -1, HEAD_DIM)
        query, key, value = qkv.split((NUM_HEADS, 1, 1), dim=1)
        attended = attention.forward(0, query, key, value, scaling=0.3)
        state = torch.cat([attended.flatten(1), x], dim=1)[logits_rows]
        return state @ self.head


def make_executor(device: FakeDevice, **limits: Any) -> StepExecutor:
    sizes = Limits(
        **{"num_rows": 8, "num_tokens": 64, "num_row_pages": 17, "page_size": 4, "num_pages": 64}
        | limits
    )
    return StepExecutor(
        device,
        TinyModel(),
        TorchDeviceAttention(SPEC, sizes, device.torch_device),
        draw.draw,
        sizes,
        max_model_len=sizes.num_row_pages * sizes.page_size - 1,
        vocab_size=VOCAB_SIZE,
    )
