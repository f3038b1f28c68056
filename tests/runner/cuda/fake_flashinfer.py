"""The wrappers of flashinfer 0.7.2 that we call, computing in torch on the fake device.

Same names and rules (read in its source): a plan is data in buffers, copied when the device gets
there from one pinned buffer per wrapper; lengths come from the host, page indices from the device.
Sinks and latent attention compute what the references of flashinfer's own tests compute.
"""

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

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

    def BatchMLAPagedAttentionWrapper(self, *args: Any, **kwargs: Any) -> "_Latents":
        return _Latents(self, *args, **kwargs)

    def module(self) -> ModuleType:
        """A module of this, as `import flashinfer` gives it."""
        module: Any = ModuleType("flashinfer")
        module.__version__ = "0.7.2"
        for name in ("BatchDecode", "BatchPrefill"):
            name += "WithPagedKVCacheWrapper"
            setattr(module, name, getattr(self, name))
        module.mla, module.jit = self.mla, self.jit
        return module  # type: ignore[no-any-return]

    @property
    def mla(self) -> SimpleNamespace:
        return SimpleNamespace(
            BatchMLAPagedAttentionWrapper=self.BatchMLAPagedAttentionWrapper,
            MLAPlanMetadata=SimpleNamespace(csr=_Metadata),
        )

    @property
    def jit(self) -> SimpleNamespace:
        variants = SimpleNamespace(attention_sink_decl={"fa2": "struct AttentionSink"})
        attention = SimpleNamespace(
            get_batch_prefill_attention_sink_uri=_sink_name, variants=variants
        )
        return SimpleNamespace(attention=attention)


HEAD_DIMS = (64, 128, 256, 512)


def _sink_name(backend: str, *types_and_sizes: Any) -> str:
    """Differs by everything that the kernels are made for, as flashinfer's own does."""
    return f"sinks {backend} {types_and_sizes}"


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

    def _rows(self, q: Tensor) -> Iterator[tuple[slice, Tensor, int, Tensor]]:
        """Tokens of each row, its pages, its length, and what each of its tokens does not see."""
        state = self._state
        qo, kv = state["qo_indptr"].tolist(), state["kv_indptr"].tolist()
        assert len(q) == qo[-1]
        for row in range(len(kv) - 1):
            pages = state["indices"][kv[row] : kv[row + 1]]
            length = (len(pages) - 1) * state["page_size"] + int(state["last_page_len"][row])
            position = torch.arange(length - (qo[row + 1] - qo[row]), length)[:, None]
            hidden = torch.arange(length) > position
            if state["window_left"] >= 0:
                hidden |= torch.arange(length) < position - state["window_left"]
            yield slice(qo[row], qo[row + 1]), pages, length, hidden

    def _attend(
        self,
        q: Tensor,
        cache: tuple[Tensor, Tensor],
        out: Tensor,
        sinks: Tensor | None = None,
    ) -> Tensor:
        state = self._state
        assert (q.is_contiguous(), out.is_contiguous()) == (True, True)
        assert q.shape[1:] == (state["num_qo_heads"], state["head_dim"])
        assert cache[0].shape[2:] == (state["num_kv_heads"], state["head_dim"])
        for tokens, pages, length, hidden in self._rows(q):
            key, value = (part[pages].flatten(0, 1)[:length].to(q.dtype) for part in cache)
            cap = state["logits_soft_cap"] or None
            options = AttentionOptions(state["sm_scale"], softcap=cap)
            found = multiply(q[None, tokens], key[None], value[None], hidden[None], options)[0]
            if sinks is not None:  # a sink takes its share of what all keys together have
                group = q.shape[1] // key.shape[1]
                scores = torch.einsum(
                    "qhd,lhd->hql",
                    q[tokens].double(),
                    key.double().repeat_interleave(group, dim=1),
                )
                scores = (scores * state["sm_scale"]).masked_fill(hidden[None], -torch.inf)
                kept = torch.sigmoid(scores.logsumexp(dim=-1) - sinks.double()[:, None])
                found = (found * kept.T[:, :, None]).to(found.dtype)
            out[tokens] = found
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
        assert head_dim in HEAD_DIMS
        self._module.num_captured_plans += self._fixed_size > 0
        host = {
            "qo_indptr": torch.arange(size + 1, dtype=torch.int32),
            "kv_indptr": indptr,
            "last_page_len": last_page_len,
        }
        settings = {
            "num_qo_heads": num_qo_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
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
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(module)
        assert (kv_layout, backend) == ("NHD", "fa2")
        self._fixed_size = 0
        if use_cuda_graph:
            assert qo_indptr_buf is not None
            assert paged_kv_indptr_buf is not None
            assert paged_kv_indices_buf is not None
            assert paged_kv_last_page_len_buf is not None
            self._fixed_size = len(paged_kv_last_page_len_buf)
            assert len(paged_kv_indptr_buf) == len(qo_indptr_buf) == self._fixed_size + 1
        self._variant: tuple[int, bool] | None = None
        if jit_args is not None:
            assert jit_kwargs is not None
            names, kinds, name = jit_args[7], jit_args[8], jit_args[11]
            assert (names, kinds, name) == (["sink"], ["float"], "AttentionSink")
            assert (jit_args[9], jit_args[10]) == (["sm_scale"], ["double"])
            assert jit_args[5] == jit_args[6]
            self._variant = jit_args[5], jit_kwargs["use_sliding_window"]

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
        assert head_dim_qk in HEAD_DIMS
        assert self._fixed_size in (0, len(paged_kv_last_page_len))
        self._module.num_captured_plans += self._fixed_size > 0
        if self._variant is not None:  # compiled for these, and knows no soft cap
            assert self._variant == (head_dim_qk, window_left >= 0)
            assert not logits_soft_cap
        host = {
            "qo_indptr": qo_indptr,
            "kv_indptr": paged_kv_indptr,
            "last_page_len": paged_kv_last_page_len,
        }
        settings = {
            "num_qo_heads": num_qo_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim_qk,
            "window_left": window_left,
            "logits_soft_cap": logits_soft_cap,
            "sm_scale": sm_scale,
        }
        self._plan(host, paged_kv_indices, page_size, **settings)

    def run(
        self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *more: Any, out: Tensor
    ) -> Tensor:
        """`more`, of the variant with sinks: a logit per query head, and the scale."""
        if self._variant is None:
            assert more == ()
            return self._attend(q, paged_kv_cache, out)
        sinks, self._state["sm_scale"] = more
        assert (sinks.dtype, sinks.shape) == (torch.float32, (q.shape[1],))
        return self._attend(q, paged_kv_cache, out, sinks)


class _Metadata(NamedTuple):
    """The page table that `MLAPlanMetadata.csr` of flashinfer makes of a plan."""

    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_len_arr: Tensor


class _Latents(_Wrapper):
    """Of a token, `head_dim_ckv` numbers that are keys and values of every head, and, behind them,
    `head_dim_kpe` more that keys have alone.
    """

    def __init__(
        self,
        module: FakeFlashInfer,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(module)
        assert backend == "fa2"
        self._fixed_size = 0
        if use_cuda_graph:
            assert qo_indptr is not None
            assert kv_indptr is not None
            assert kv_indices is not None
            assert kv_len_arr is not None
            self._fixed_size = len(kv_len_arr)
            assert len(qo_indptr) == len(kv_indptr) == self._fixed_size + 1

    def plan(
        self,
        *,
        metadata: _Metadata,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        scale_mode: str = "default",
    ) -> None:
        assert causal
        assert (head_dim_ckv % 128, head_dim_kpe % 64) == (0, 0)
        q_lens, lengths = metadata.qo_indptr.diff(), metadata.kv_len_arr
        tile = 128 if int(metadata.qo_indptr[-1]) * num_heads // len(q_lens) > 64 else 64
        assert tile % num_heads == 0, "else a plan is refused where a tile cuts a token"
        assert self._fixed_size in (0, len(lengths))
        assert (scale_mode == "kv-per-tensor") is (kv_data_type == torch.float8_e4m3fn)
        num_pages = -(-lengths // page_size)
        assert torch.equal(num_pages, metadata.kv_indptr.diff())
        self._module.num_captured_plans += self._fixed_size > 0
        host = {
            "qo_indptr": metadata.qo_indptr,
            "kv_indptr": metadata.kv_indptr,
            "last_page_len": lengths - (num_pages - 1) * page_size,
        }
        settings = {"sm_scale": sm_scale, "sizes": (num_heads, head_dim_ckv, head_dim_kpe)}
        settings |= {"window_left": -1, "kv_data_type": kv_data_type}
        self._plan(host, metadata.kv_indices, page_size, **settings)

    def run(
        self,
        *,
        query: Tensor,
        kv_cache: Tensor,
        out: Tensor,
        ckv_scale: float | None = None,
        kpe_scale: float | None = None,
    ) -> Tensor:
        num_heads, ckv, kpe = self._state["sizes"]
        assert query.shape[1:] == (num_heads, ckv + kpe)
        assert out.shape == (len(query), num_heads, ckv)
        assert kv_cache.dim() == 3
        assert kv_cache.shape[2] == ckv + kpe
        is_fp8 = kv_cache.dtype == torch.float8_e4m3fn
        assert (ckv_scale, kpe_scale) == ((1.0, 1.0) if is_fp8 else (None, None))
        for tokens, pages, length, hidden in self._rows(query):
            kept = kv_cache[pages].flatten(0, 1)[:length].double()
            states, turned = kept[:, :ckv], kept[:, ckv:]
            q_states, q_turned = query[tokens].double().split((ckv, kpe), dim=-1)
            scores = torch.einsum("qhd,ld->hql", q_states, states)
            scores += torch.einsum("qhd,ld->hql", q_turned, turned)
            scores = (scores * self._state["sm_scale"]).masked_fill(hidden[None], -torch.inf)
            shares = scores.softmax(dim=-1)
            out[tokens] = torch.einsum("hql,ld->qhd", shares, states).to(out.dtype)
        return out
