"""The kernels are compiled with warnings as errors, for CPU and CUDA, and run under the sanitizers."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
SANITIZE = ["-fsanitize=address", "-fsanitize=undefined"]
SANITIZERS = [*SANITIZE, "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-O1"]


def load_build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernel_build", CSRC / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build: Any = load_build()
NVCC = build.find_nvcc()


def run(command: list[str], **options: Any) -> str:
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Every source compiled with warnings as errors: C++ with sanitizers, CUDA for all supported GPUs."""
    folder = tmp_path_factory.mktemp("kernels")

    def compile_one(source: Path) -> Path:
        target = folder / f"{source.name}.o"
        if source.suffix == ".cu":
            run(build.nvcc_command(NVCC, source, target, "-Werror=all-warnings", "-Xcompiler=-Werror"))
        else:
            run(build.cxx_command(source, target, "-Werror", *SANITIZERS))
        return target

    sources = [source for source in sorted(CSRC.glob("*.c*")) if source.suffix == ".cpp" or NVCC]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(compile_one, sources))


@pytest.mark.skipif(NVCC is None, reason="no nvcc")
def test_cuda_code_is_made_for_every_supported_gpu(objects: list[Path]) -> None:
    assert [path.name for path in objects].count("copy.cu.o") == 1  # without a warning
    command = build.nvcc_command(NVCC, CSRC / "copy.cu", objects[0])
    for number in (80, 90, 100):
        assert f"-gencode=arch=compute_{number},code=sm_{number}" in command


EXERCISE = """
import random, sys
import torch
torch.ops.load_library(sys.argv[1])
ops, rng = torch.ops.spmd_rl, random.Random(0)
for turn in range(200):
    size = rng.randint(1, 40000)
    source, target = torch.randint(0, 256, (size,), dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    cuts = sorted(rng.randint(0, size) for _ in range(rng.randint(0, 20)))
    begin = torch.tensor([0, *cuts]); sizes = torch.tensor([*cuts, size]) - begin
    table = torch.stack([torch.zeros_like(begin), begin, begin, sizes]).contiguous()
    ops.copy_segments([source], target, table)
    assert torch.equal(source, target)
    rows, columns = rng.randint(1, 5), rng.randint(1, 2000)
    values, packed = torch.randn(rows, columns + 3), torch.zeros(rows, columns, dtype=torch.bfloat16)
    slices = torch.tensor([[0, 0, columns + 3, 0, 0, columns, rows, columns]]).T.contiguous()
    ops.copy_slices([values], [packed], slices)
    assert torch.equal(packed, values[:, :columns].to(torch.bfloat16))
    length = torch.randint(0, 900, (rng.randint(0, 9), 2)); unit = torch.tensor([1, 8])
    order, bins = torch.randperm(len(length)), torch.randint(-1, 3, (len(length),))
    columns = [torch.randint(0, 256, (int(n),), dtype=torch.uint8) for n in (length * unit).sum(0)]
    places, starts = ops.lay_out(length, unit, order, bins, 3)
    blocks = [torch.zeros(int(n), dtype=torch.uint8) for n in starts[:, -1]]
    back = order.argsort()
    ops.deliver(columns, blocks, length, unit, bins[back].contiguous(), places[back].contiguous())
    ids = torch.stack([order // 3, order % 3, order], 1) if len(order) else torch.empty(0, 3, dtype=torch.int64)
    where = torch.randint(0, 4, (len(order),))
    ops.divide(ids, where, length[:, 0].contiguous(), 1.0, 0.5, turn % 2 == 0, turn % 3 == 0, 1.1, turn % 5 == 0, 4, 4)
    slots = ops.partition(torch.rand(rng.randint(0, 300), dtype=torch.float64), rng.randint(1, 9), turn % 2 == 0)
for bad in ([0, 0, 1, 40000], [0, 1, 0, 40000], [1, 0, 0, 1], [0, -1, 0, 1]):
    try:
        nine = torch.zeros(9, dtype=torch.uint8)
        ops.copy_segments([nine], nine.clone(), torch.tensor([bad]).T.contiguous())
    except RuntimeError:
        continue
    raise SystemExit(f"accepted {bad}")
for bad in ((10, 0, 0), (-1, 0, 0), (4, 1, 0), (4, 0, 6), (4, 0, -1), (4, 0, 2**63 - 2)):
    try:
        nine, one = torch.zeros(9, dtype=torch.uint8), torch.ones(1, dtype=torch.int64)
        ops.deliver([nine], [nine.clone()], one[None] * bad[0], one, one * bad[1], one[None] * bad[2])
    except RuntimeError:
        continue
    raise SystemExit(f"accepted {bad}")
print("exercised")
"""


def test_the_library_runs_clean_under_the_sanitizers(objects: list[Path]) -> None:
    """With its CUDA part, where that was compiled: such a library must load into a CPU build of torch, too."""
    library = objects[0].parent / "_kernels.so"
    run(build.link_command(objects, library, NVCC, *SANITIZE))
    preload = [run(["g++", f"-print-file-name={name}"]).strip() for name in ("libasan.so", "libubsan.so")]
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(preload),
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:protect_shadow_gap=0",
        "OMP_NUM_THREADS": "1",
    }
    assert "exercised" in run([sys.executable, "-c", EXERCISE, str(library)], env=environment, timeout=200)


def test_the_index_functions_run_clean_as_a_gpu_would_run_them(tmp_path: Path) -> None:
    program = tmp_path / "index_test"
    flags = [*build.COMMON[:1], "-ffp-contract=off", "-Wall", "-Wextra", "-Wconversion", "-Werror", *SANITIZERS]
    sources = [str(CSRC / "test" / "index_test.cpp"), str(CSRC / "partition.cpp")]
    run(["g++", *flags, "-DSPMD_RL_WITHOUT_TORCH", *sources, "-o", str(program)])
    assert "300 turns passed" in run([str(program), "300"], timeout=120)


def test_a_machine_without_nvcc_builds_for_cpu_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    monkeypatch.delenv("SPMD_RL_CUDA", raising=False)
    assert build.wants_cuda() == (False, "no nvcc found")
    monkeypatch.setenv("SPMD_RL_CUDA", "1")
    with pytest.raises(SystemExit, match="there is no nvcc"):
        build.wants_cuda()


def test_architectures_can_be_chosen() -> None:
    assert build.architecture_flags("8.0;9.0") == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_90,code=compute_90",
    ]
