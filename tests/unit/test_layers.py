"""Imports point downward. Reads every module's imports, also those inside functions and for type checking."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "spmd_rl"

# layer → what it may import of spmd_rl, beside itself. A dotted name admits that module alone.
LAYERS: dict[str, set[str]] = {
    "config": set(),
    "ops": set(),
    "comm": {"ops", "config"},
    "observe": {"comm", "config"},
    "data": {"observe", "comm", "ops", "config"},
    "algorithms": {"data.batch", "observe.metrics", "engines.protocol", "config"},
    "weights": {"comm", "config", "ops"},
    "engines": {"weights", "algorithms", "data", "observe", "comm", "ops", "config"},
    "graph": {"data", "observe", "comm", "config"},
    "checkpoint": {"observe", "comm", "config"},
    "recipes": {
        *("graph", "checkpoint", "engines", "weights", "algorithms", "data", "observe", "comm", "ops", "config"),
    },
}
TOP = {"main", "job", "job_async", "job_trainer", "job_replica", "job_loss", "service"}  # may import everything

# third-party package → modules (prefixes, below spmd_rl) that may import it
CONFINED: dict[str, tuple[str, ...]] = {
    "vllm": ("engines.rollout.vllm",),
    "mpi4py": ("comm",),
    "ray": (),
    "peft": ("engines.train.lora",),
    "transformers": ("engines", "data", "recipes", "config", "job"),
    "omegaconf": ("config",),
}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(source: str, module: str, is_package: bool = False) -> set[str]:
    """Absolute dotted names that a module imports. `from a.b import c` gives a.b, and a.b.c where that is a module."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = ["spmd_rl", *filter(None, module.split("."))]
                above = node.level - 1 if is_package else node.level
                base = ".".join([*package[: len(package) - above], *filter(None, [node.module])])
            children = {f"{base}.{alias.name}" for alias in node.names}
            modules = {name for name in children if is_module(name)}
            found |= modules or {base}
            if modules != children:
                found.add(base)
    return found


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def forbidden(module: str, imported: str) -> bool:
    """Whether module (below spmd_rl) may not import the absolute name."""
    top, _, inner = imported.partition(".")
    if top in CONFINED:
        return not any(module == prefix or module.startswith(prefix) for prefix in CONFINED[top])
    layer = module.partition(".")[0]
    if top != "spmd_rl" or not inner or layer in TOP or not layer:
        return False
    allowed = LAYERS[layer] | {layer}
    return not any(inner == name or inner.startswith(f"{name}.") for name in allowed)


MODULES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_point_downward(path: Path) -> None:
    module = module_name(path)
    layer = module.partition(".")[0]
    assert not module or layer in LAYERS or layer in TOP, f"{layer} is no layer: name it in LAYERS"
    found = imports(path.read_text(), module, path.name == "__init__.py")
    wrong = sorted(name for name in found if forbidden(module, name))
    assert not wrong, f"{module} may not import {', '.join(wrong)}"


def test_the_reader_sees_every_way_to_import() -> None:
    source = (
        "import ray.util\nfrom spmd_rl.engines import protocol\nfrom ..engines.train import engine\n"
        "def late():\n    from vllm import LLM\n"
    )
    names = imports(source, "graph.plan")
    assert {"ray.util", "vllm", "spmd_rl.engines.protocol"} < names and len(names) == 4
    assert all(forbidden("graph.plan", name) for name in names)
    assert not forbidden("engines.rollout.vllm_cpu", "vllm")
    assert not forbidden("algorithms.losses", "spmd_rl.data.batch")
    assert forbidden("algorithms.losses", "spmd_rl.data.loader")


def test_no_file_names_a_machine() -> None:
    """Paths of somebody's machine and addresses of package hosts have no place in the project."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode:  # an unpacked archive, not a clone
        files = [path for path in ROOT.rglob("*") if path.is_file() and ".venv" not in path.parts]
    else:
        files = [ROOT / name for name in listed.stdout.splitlines()]
    paths = r"(?<![\w.])/(?:work|root|home|Users|opt/wheels|opt/pypi)/|/tmp/[a-z]"
    pattern = re.compile(paths + r"|(?:pypi|download\.pytorch)\.org")
    found = []
    for path in files:
        if path.suffix not in {".py", ".sh", ".md", ".yaml", ".toml", ".cpp", ".cu", ".h", ".sbatch", ".cfg", ""}:
            continue
        if path == Path(__file__) or path.name == "LICENSE" or not path.is_file():
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert not found, "\n".join(found)
