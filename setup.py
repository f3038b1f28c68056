"""Compiles the CPU kernels, one extension per instruction set, and what tells which of them serve.

They are optional: without Linux or a C compiler the package installs without them, and says at
start that it runs on plain torch. The packages are listed here too, since one is not found by
its place: `policies/` is installed as `aioserve.policies`. All else is in pyproject.toml.
"""

import platform
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup

SOURCES = Path("aioserve/kernels/src")
# What a variant may use; the CPU flags it needs are in aioserve/kernels/library.py: keep in step.
FLAGS = {"baseline": []}
if platform.machine() in ("x86_64", "AMD64"):
    FLAGS["avx2"] = ["-mavx2", "-mfma", "-mf16c"]
    FLAGS["avx512"] = [*FLAGS["avx2"], *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")]
    FLAGS["avx512_bf16"] = [*FLAGS["avx512"], "-mavx512bf16"]

setup(
    packages=[*find_packages(include=["aioserve*"]), "aioserve.policies"],
    ext_modules=[
        *(
            Extension(
                f"aioserve.kernels._{variant}",
                sources=[str(SOURCES / "kernels.c")],
                depends=["setup.py", *map(str, sorted(SOURCES.glob("*.h")))],
                # -fopenmp only here, not for the linker: the runtime is the one that torch brings
                extra_compile_args=[
                    *("-O3", "-std=gnu11", "-fopenmp", "-fvisibility=default", "-Wno-psabi"),
                    *("-fno-math-errno", "-fno-trapping-math"),
                    *flags,
                ],
                optional=True,
            )
            for variant, flags in FLAGS.items()
        ),
        Extension(
            "aioserve.kernels._cpu",
            sources=[str(SOURCES / "cpu.c")],
            extra_compile_args=["-std=gnu11", "-fvisibility=default"],
            optional=True,
        ),
    ]
    if sys.platform == "linux"
    else [],
)
