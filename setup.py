"""Compiles the CPU kernels, one extension per instruction set; all else is in pyproject.toml.

They are optional: without Linux or a C compiler the package installs without them, and says at
start that it runs on plain torch.
"""

import platform
import sys

from setuptools import Extension, setup

SOURCES = "aioserve/kernels/src/"
HEADERS = ["vector.h", "elementwise.h", "plan.h", "attention.h", "linear.h", "decoder.h"]
FLAGS = {"baseline": []}
if platform.machine() in ("x86_64", "AMD64"):
    FLAGS["avx2"] = ["-mavx2", "-mfma"]
    FLAGS["avx512"] = [
        *FLAGS["avx2"],
        *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16"),
    ]

setup(
    ext_modules=[
        Extension(
            f"aioserve.kernels._{variant}",
            sources=[SOURCES + "kernels.c"],
            depends=[SOURCES + header for header in HEADERS],
            # -fopenmp only here, not for the linker: the runtime is the one that torch brings
            extra_compile_args=[
                *("-O3", "-std=gnu11", "-fopenmp", "-fvisibility=default", "-Wno-psabi"),
                *("-fno-math-errno", "-fno-trapping-math"),
                *flags,
            ],
            optional=True,
        )
        for variant, flags in FLAGS.items()
        if sys.platform == "linux"
    ]
)
