"""Compiles the CPU kernels, one extension per instruction set, and what tells which of them serve.

They are optional: without Linux or a C compiler the package installs without them, and says at
start that it runs on plain torch. The packages are listed here too: two are not found by their
places, since `configs/` and `policies/` stand at the top. All else is in pyproject.toml.
"""

import base64
import copy
import csv
import hashlib
import io
import os
import platform
import sys
import zipfile
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.editable_wheel import editable_wheel

SOURCES = Path("aioserve/kernels/src")
# What a variant may use; the CPU flags it needs are in aioserve/kernels/library.py: keep in step.
FLAGS = {"baseline": []}
if platform.machine() in ("x86_64", "AMD64"):
    FLAGS["avx2"] = ["-mavx2", "-mfma", "-mf16c"]
    FLAGS["avx2_vnni"] = [*FLAGS["avx2"], "-mavxvnni"]
    FLAGS["avx512"] = [*FLAGS["avx2"], *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")]
    FLAGS["avx512_vnni"] = [*FLAGS["avx512"], "-mavx512vnni"]
    FLAGS["avx512_bf16"] = [*FLAGS["avx512_vnni"], "-mavx512bf16"]
    FLAGS["amx_bf16"] = [*FLAGS["avx512_bf16"], *("-mamx-tile", "-mamx-bf16", "-mamx-int8")]

# A library of other sources is not loaded: aioserve/kernels/library.py makes the same digest.
DIGEST = hashlib.sha256(
    b"".join(path.read_bytes() for path in sorted(SOURCES.glob("*.[ch]")))
).hexdigest()

# What chooses tokens is a library of its own; its digest is made by aioserve/kernels/tokens.py.
TOKENS = SOURCES / "tokens/choose_tokens.c"
TOKENS_DIGEST = hashlib.sha256(
    b"".join(path.read_bytes() for path in (SOURCES / "vector.h", TOKENS))
).hexdigest()
# -fopenmp only here, not for the linker: the runtime is the one that torch brings
KERNEL_FLAGS = [
    *("-O3", "-g0", "-std=gnu11", "-fopenmp", "-fvisibility=default"),
    "-Wno-psabi",
    *("-fno-math-errno", "-fno-trapping-math"),
    "-fstrict-overflow",  # Python's own -fwrapv costs quantized products a tenth
]

# A release must have all kernels; anybody else gets those that can be compiled.
OPTIONAL = os.environ.get("AIOSERVE_BUILD") != "release"


class BuildKernels(build_ext):
    """Plain shared libraries: they call no Python, so their names have no Python version."""

    def get_ext_filename(self, fullname):
        return f"{fullname.replace('.', '/')}.so"

    def finalize_options(self):
        super().finalize_options()
        self.parallel = self.parallel or True  # as many at a time as there are cores

    def build_extension(self, ext):
        own = copy.copy(self)  # the variants have their sources in common: not their objects too
        own.build_temp = f"{self.build_temp}/{ext.name}"
        super(BuildKernels, own).build_extension(ext)


class BuildWheel(bdist_wheel):
    """One wheel for every Python, of one platform if there are kernels in it."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


class EditableWheel(editable_wheel):
    """Adds a .pth file that names this folder. Without it Python finds the package through a hook
    that runs at import, and type checkers, which run nothing, do not find it at all.
    """

    def run(self):
        super().run()
        [wheel] = Path(self.dist_dir).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            files = {name: archive.read(name) for name in archive.namelist()}
        files["aioserve_checkout.pth"] = f"{Path(__file__).parent.resolve()}\n".encode()
        [record] = [name for name in files if name.endswith(".dist-info/RECORD")]
        rows = io.StringIO()
        for name, content in files.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            row = (name, f"sha256={digest}", len(content)) if name != record else (name, "", "")
            csv.writer(rows, lineterminator="\n").writerow(row)
        files[record] = rows.getvalue().encode()
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)


setup(
    cmdclass={
        "bdist_wheel": BuildWheel,
        "build_ext": BuildKernels,
        "editable_wheel": EditableWheel,
    },
    packages=[
        *find_packages(include=["aioserve*"]),
        *("aioserve.configs", "aioserve.policies"),
        *("aioserve.policies.composed", "aioserve.policies.zoo"),
    ],
    ext_modules=[
        *(
            Extension(
                f"aioserve.kernels._{variant}",
                sources=[str(SOURCES / "kernels.c")],
                depends=["setup.py", *map(str, sorted(SOURCES.glob("*.h")))],
                define_macros=[("SOURCES_DIGEST", f'"{DIGEST}"')],
                extra_compile_args=[*KERNEL_FLAGS, *flags],
                optional=OPTIONAL,
            )
            for variant, flags in FLAGS.items()
        ),
        *(
            Extension(
                f"aioserve.kernels._tokens_{variant}",
                sources=[str(TOKENS)],
                depends=["setup.py", str(SOURCES / "vector.h")],
                define_macros=[("SOURCES_DIGEST", f'"{TOKENS_DIGEST}"')],
                extra_compile_args=[*KERNEL_FLAGS, *FLAGS[variant]],
                optional=OPTIONAL,
            )
            for variant in ("avx512", "avx2", "baseline")
            if variant in FLAGS
        ),
        Extension(
            "aioserve.kernels._cpu",
            sources=[str(SOURCES / "cpu.c")],
            extra_compile_args=["-std=gnu11", "-fvisibility=default"],
            optional=OPTIONAL,
        ),
    ]
    if sys.platform == "linux"
    else [],
)
