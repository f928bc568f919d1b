"""Builds the compiled kernels where torch and a C++ compiler for x86-64 are at hand; dspark runs without them too."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

from setuptools import setup

SOURCES = ["bindings.cpp", "kernels_avx2.cpp", "kernels_avx512.cpp"]
FOLDER = Path("dspark") / "csrc"


def _kernels() -> dict[str, object]:
    """Return what `setup` needs for them: nothing where they cannot be built."""
    if platform.machine().lower() not in ("x86_64", "amd64") or sys.platform != "linux":
        return {}
    try:
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError:
        # A build that is isolated from the environment has no torch; fetching one for it would take gigabytes.
        print("dspark: built without kernels, for torch is not there; use --no-build-isolation", file=sys.stderr)
        return {}
    extension = CppExtension(
        "dspark._kernels",
        [str(FOLDER / name) for name in SOURCES],
        depends=[str(path) for path in sorted(FOLDER.iterdir())],
        extra_compile_args=["-O3", "-g0", "-fopenmp", "-Wall", "-Wextra", "-fvisibility=hidden", "-ffp-contract=off"],
    )
    extension.optional = True

    class BuildIfPossible(BuildExtension):
        def build_extensions(self) -> None:
            try:
                super().build_extensions()
            except Exception as error:  # whatever a missing or old compiler leads to: it is no reason not to install
                print(f"dspark: built without kernels: {error}", file=sys.stderr)

    return {"ext_modules": [extension], "cmdclass": {"build_ext": BuildIfPossible}}


setup(**_kernels())  # type: ignore[arg-type]
