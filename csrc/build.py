"""What setup.py compiles: one library for every torch that has the same stable ABI, with CUDA where that is wanted.

CUDA is compiled where torch itself has it and nvcc is found. SPMD_RL_CUDA=1 compiles it also for a CPU build of
torch, SPMD_RL_CUDA=0 leaves it out. TORCH_CUDA_ARCH_LIST ("8.0;9.0") chooses the GPUs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from setuptools import Extension
from setuptools.command.build_ext import build_ext

SOURCES = Path(__file__).parent
ARCHITECTURES = "8.0;9.0;10.0"
TARGET_VERSION = "0x020a000000000000"  # the oldest torch whose stable ABI is used: 2.10
COMMON = ["-std=c++17", "-O3", f"-DTORCH_TARGET_VERSION={TARGET_VERSION}ULL"]
# No contraction to fused multiply-add: plans must be equal on all machines of a job.
HOST = ["-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wextra", "-Wconversion"]


def find_nvcc() -> str | None:
    for home in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")):
        if home and (Path(home) / "bin" / "nvcc").exists():
            return str(Path(home) / "bin" / "nvcc")
    return shutil.which("nvcc") or next(map(str, Path("/usr/local").glob("cuda/bin/nvcc")), None)


def architecture_flags(architectures: str) -> list[str]:
    """`-gencode` for each of "8.0;9.0", and code that later GPUs can compile for themselves from the last."""
    numbers = [entry.replace(".", "").strip() for entry in architectures.replace(",", ";").split(";") if entry.strip()]
    flags = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in numbers]
    return [*flags, f"-gencode=arch=compute_{numbers[-1]},code=compute_{numbers[-1]}"]


def include_flags() -> list[str]:
    import torch

    # As system headers: their warnings are not ours.
    return ["-isystem", str(Path(torch.__file__).parent / "include")]


def cxx_command(source: Path, target: Path, *flags: str) -> list[str]:
    compiler = os.environ.get("CXX", "g++")
    return [compiler, *COMMON, *HOST, *flags, *include_flags(), "-c", str(source), "-o", str(target)]


def nvcc_command(nvcc: str, source: Path, target: Path, *flags: str) -> list[str]:
    architectures = architecture_flags(os.environ.get("TORCH_CUDA_ARCH_LIST") or ARCHITECTURES)
    host = [f"-Xcompiler={flag}" for flag in ("-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")]
    options = [*COMMON, "--expt-relaxed-constexpr", *architectures, *host, *flags, *include_flags()]
    return [nvcc, *options, "-c", str(source), "-o", str(target)]


def link_command(objects: list[Path], library: Path, nvcc: str | None, *flags: str) -> list[str]:
    """nvcc, where there is CUDA code: it knows where its runtime library lies."""
    import torch

    if nvcc is None:
        link = [os.environ.get("CXX", "g++"), "-shared", *flags]
    else:
        link = [nvcc, "-shared", "-cudart=static", *(f"-Xcompiler={flag}" for flag in flags)]
    return [*link, *map(str, objects), "-o", str(library), f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu"]


def wants_cuda() -> tuple[bool, str]:
    """Whether to compile for CUDA, and why (or why not)."""
    import torch

    choice = os.environ.get("SPMD_RL_CUDA", "auto")
    if choice == "0":
        return False, "SPMD_RL_CUDA=0"
    if find_nvcc() is None:
        if choice == "1":
            raise SystemExit("SPMD_RL_CUDA=1, but there is no nvcc: set CUDA_HOME")
        return False, "no nvcc found"
    if torch.version.cuda is None and choice != "1":
        return False, "torch is a CPU build"
    return True, f"with {find_nvcc()}"


class BuildKernels(build_ext):
    def build_extension(self, ext: Extension) -> None:
        cuda, why = wants_cuda()
        print(f"kernels: CPU{' and CUDA' if cuda else ' only'} ({why})", flush=True)
        folder = Path(self.build_temp)
        folder.mkdir(parents=True, exist_ok=True)
        objects = []
        for source in map(Path, ext.sources):
            if source.suffix == ".cu" and not cuda:
                continue
            target = folder / f"{source.name}.o"
            nvcc = find_nvcc()
            if source.suffix == ".cu" and nvcc is not None:
                command = nvcc_command(nvcc, source, target)
            else:
                command = cxx_command(source, target)
            run(command)
            objects.append(target)
        library = Path(self.get_ext_fullpath(ext.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        run(link_command(objects, library, find_nvcc() if cuda else None))


def run(command: list[str]) -> None:
    print(" ".join(command), flush=True)
    subprocess.run(command, check=True)


def ext_modules() -> list[Extension]:
    sources = sorted(path for path in SOURCES.glob("*.c*") if path.suffix in (".cpp", ".cu"))
    headers = sorted(SOURCES.glob("*.h"))
    root = SOURCES.parent
    return [
        Extension(
            "spmd_rl.ops._kernels",
            sources=[str(path.relative_to(root)) for path in sources],
            depends=[str(path.relative_to(root)) for path in headers],
        )
    ]


def cmdclass() -> dict[str, Any]:
    return {"build_ext": BuildKernels}
