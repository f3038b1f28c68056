"""What the interpreter runs, the compiler takes: machine code for cards, made without one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def compile_all(capability: int) -> None:
    """Every kernel for every type that it serves. Not in the interpreter."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from aioserve.gpu.cuda import triton_kernels

    types = {
        "size num_rows num_heads num_kv_heads num_chunks width": "i32",
        "highest temperature floor lowest parts next_parts scores top_p cos_sin": "*fp32",
        "keys top_k low next_low": "*i32",
        "tokens positions slots": "*i64",
        "eps limit": "fp32",
    }
    of = {name: kind for names, kind in types.items() for name in names.split()}

    def build(kernel: object, constants: dict[str, int | bool], **more: str) -> None:
        names = kernel.arg_names  # type: ignore[attr-defined]
        kinds = {**of, **more, **dict.fromkeys(constants, "constexpr")}
        source = ASTSource(
            kernel,
            {name: kinds[name] for name in names},
            {(names.index(name),): value for name, value in constants.items()},
        )
        binary = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]
        assert len(binary) > 1000

    for kind in ("*bf16", "*fp16", "*fp32"):
        build(triton_kernels._draw_kernel, {"BLOCK": 4096}, logits=kind)
        for flag in (True, False):
            search = {"BY_MASS": flag, "CHUNKS": 64, "WAYS": 16}
            build(triton_kernels._lowest_kernel, search)
            for first in (True, False):
                own = {"IS_FIRST": first, "BLOCK": 4096}
                build(triton_kernels._above_kernel, search | own, logits=kind)
            rows = dict.fromkeys(("x", "residual", "weight", "out"), kind)
            build(triton_kernels._norm_kernel, {"HAS_RESIDUAL": flag, "BLOCK": 4096}, **rows)
            build(triton_kernels._gate_kernel, {"IS_SILU": flag, "BLOCK": 1024}, x=kind, out=kind)
            sizes = {"HALF": 64, "HALF_BLOCK": 64, "WIDTH": 128, "HEADS": 8, "HAS_NORMS": flag}
            rows = dict.fromkeys(("qkv", "query_norm", "key_norm"), kind)
            for cache in (kind, "*fp8e4nv") if capability >= 89 else (kind,):
                build(triton_kernels._rope_store_kernel, sizes, keys=cache, values=cache, **rows)
    build(triton_kernels._uniform_kernel, {"BLOCK": 4096}, out="*fp32")


@pytest.mark.slow
def test_every_kernel_compiles_for_cards(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    code = "from tests.runner.cuda.test_compile import compile_all\ncompile_all(90)"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
