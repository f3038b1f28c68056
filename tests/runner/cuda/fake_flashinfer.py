"""The two wrappers of flashinfer 0.7.2 that we call, computing in torch on the fake device.

Same names and rules (read in its source): a plan is data in buffers, copied when the device gets
there from one pinned buffer per wrapper; lengths come from the host, page indices from the device.
"""

from typing import Any

import torch
from torch import Tensor

from aioserve.gpu.cuda.attention import multiply
from aioserve.runner.attention.backend import AttentionOptions
from tests.runner.cuda.fake_device import FakeDevice


class FakeFlashInfer:
    """Stands for the module. `device_memory` is what page indices must lie in, if given."""

    def __init__(self, device: FakeDevice, device_memory: Tensor | None) -> None:
        self.device = device
        self.storage = None if device_memory is None else _storage(device_memory)
        self.num_plans = 0
        self.num_captured_plans = 0

    def BatchDecodeWithPagedKVCacheWrapper(self, *args: Any, **kwargs: Any) -> "_Decode":
        return _Decode(self, *args, **kwargs)

    def BatchPrefillWithPagedKVCacheWrapper(self, *args: Any, **kwargs: Any) -> "_Prefill":
        return _Prefill(self, *args, **kwargs)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Wrapper:
    def __init__(self, module: FakeFlashInfer) -> None:
        self._module = module
        self._pinned = module.device.host_buffer(1)
        self._int_workspace = torch.zeros(1, dtype=torch.int32)
        self._state: dict[str, Any] = {}

    def _plan(
        self, host: dict[str, Tensor], indices: Tensor, page_size: int, **settings: Any
    ) -> None:
        module, device = self._module, self._module.device
        module.num_plans += 1
        assert all(tensor.dtype == torch.int32 for tensor in host.values())
        if module.storage is not None:
            assert all(_storage(tensor) != module.storage for tensor in host.values())
            assert _storage(indices) == module.storage
        assert int(host["kv_indptr"][0]) == 0
        assert len(indices) == int(host["kv_indptr"][-1])
        assert int(host["last_page_len"].min()) >= 1
        self._pinned.array[0] = module.num_plans  # raises if the last plan is still being copied
        device.stage(self._int_workspace, self._pinned)

        def arrive() -> None:
            self._state = {name: tensor.clone() for name, tensor in host.items()}
            self._state |= {"indices": indices.clone(), "page_size": page_size, **settings}

        device.put(arrive)

    def _attend(self, q: Tensor, cache: tuple[Tensor, Tensor], out: Tensor) -> Tensor:
        state = self._state
        qo, kv = state["qo_indptr"].tolist(), state["kv_indptr"].tolist()
        assert len(q) == qo[-1]
        for row in range(len(kv) - 1):
            pages = state["indices"][kv[row] : kv[row + 1]]
            length = (len(pages) - 1) * state["page_size"] + int(state["last_page_len"][row])
            key, value = (part[pages].flatten(0, 1)[:length].to(q.dtype) for part in cache)
            tokens = slice(qo[row], qo[row + 1])
            position = torch.arange(length - (qo[row + 1] - qo[row]), length)[:, None]
            hidden = torch.arange(length) > position
            if state["window_left"] >= 0:
                hidden |= torch.arange(length) < position - state["window_left"]
            cap = state["logits_soft_cap"] or None
            options = AttentionOptions(state["sm_scale"], softcap=cap)
            out[tokens] = multiply(q[None, tokens], key[None], value[None], hidden[None], options)[
                0
            ]
        return out


class _Decode(_Wrapper):
    def __init__(
        self,
        module: FakeFlashInfer,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
    ) -> None:
        super().__init__(module)
        assert kv_layout == "NHD"
        self._fixed_size = 0
        if use_cuda_graph:
            assert paged_kv_indptr_buffer is not None
            assert paged_kv_indices_buffer is not None
            assert paged_kv_last_page_len_buffer is not None
            self._fixed_size = len(paged_kv_last_page_len_buffer)
            assert len(paged_kv_indptr_buffer) == self._fixed_size + 1

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        sm_scale: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        size = len(last_page_len)
        assert self._fixed_size in (0, size)
        self._module.num_captured_plans += self._fixed_size > 0
        host = {
            "qo_indptr": torch.arange(size + 1, dtype=torch.int32),
            "kv_indptr": indptr,
            "last_page_len": last_page_len,
        }
        settings = {
            "window_left": window_left,
            "logits_soft_cap": logits_soft_cap,
            "sm_scale": sm_scale,
        }
        self._plan(host, indices, page_size, **settings)

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        return self._attend(q, paged_kv_cache, out)


class _Prefill(_Wrapper):
    def __init__(
        self,
        module: FakeFlashInfer,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        backend: str = "auto",
    ) -> None:
        super().__init__(module)
        assert (kv_layout, backend) == ("NHD", "fa2")

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        non_blocking: bool = True,
    ) -> None:
        assert causal
        assert int(qo_indptr[0]) == 0
        host = {
            "qo_indptr": qo_indptr,
            "kv_indptr": paged_kv_indptr,
            "last_page_len": paged_kv_last_page_len,
        }
        settings = {
            "window_left": window_left,
            "logits_soft_cap": logits_soft_cap,
            "sm_scale": sm_scale,
        }
        self._plan(host, paged_kv_indices, page_size, **settings)

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
        return self._attend(q, paged_kv_cache, out)
