"""Every key of the schema is read by the program: a key that no code reads does nothing, and must not exist.

The reader below follows types through the syntax tree as far as the program's style needs it: annotated parameters and
fields, `self._config = config`, `settings = self._config.train.optimizer`, loops over lists of sections.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from spmd_rl.config import schema

PACKAGE = Path(__file__).parents[2] / "spmd_rl"
SECTIONS = {
    c.__name__: get_type_hints(c) for c in vars(schema).values() if isinstance(c, type) and dataclasses.is_dataclass(c)
}
HOLDERS = {"Context": "Config", "BuildContext": "Config", "Source": "SourceConfig"}  # their field `config`


def section_in(hint: Any) -> str | None:
    """The section that a field holds, by itself or in a list."""
    return next((name for h in (hint, *get_args(hint)) if (name := getattr(h, "__name__", "")) in SECTIONS), None)


class Reader(ast.NodeVisitor):
    """Collects (section, field) of every attribute access whose owner is known to be a section."""

    def __init__(self, returned: dict[str, str]) -> None:
        self.read: set[tuple[str, str]] = set()
        self._returned = returned  # function name → the section that it gives back
        self._types: list[dict[str, str]] = [{}]  # one scope within another; `self.x` is known in all of a module

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        self._types.append({a.arg: found for a in arguments if (found := self.annotated(a.annotation))})
        self.generic_visit(node)
        self._types.pop()

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=True))
            for to, value in pairs:
                self._assign(to, self._type_of(value))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._assign(node.target, self.annotated(node.annotation))
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self._loop(node.target, node.iter)
        self.generic_visit(node)

    def visit_comprehension_of(self, node: Any) -> None:
        for part in node.generators:
            self._loop(part.target, part.iter)
        self.generic_visit(node)

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = visit_comprehension_of

    def visit_Attribute(self, node: ast.Attribute) -> None:
        owner = self._type_of(node.value)
        if owner is not None and owner in SECTIONS:
            self.read.add((owner, node.attr))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """`getattr(section, key)` may read any field."""
        if isinstance(node.func, ast.Name) and node.func.id == "getattr" and not isinstance(node.args[1], ast.Constant):
            owner = self._type_of(node.args[0])
            self.read |= {(owner, field) for field in SECTIONS.get(owner or "", ()) if owner is not None}
        self.generic_visit(node)

    def _assign(self, to: ast.expr, type_: str | None) -> None:
        if type_ is None:
            return
        scope = self._types[0] if isinstance(to, ast.Attribute) else self._types[-1]
        scope[ast.unparse(to)] = type_

    def _loop(self, target: ast.expr, over: ast.expr) -> None:
        """`for x in xs`, `for i, x in enumerate(xs)`, `for a, b in zip(xs, ys)`."""
        values = over.args if isinstance(over, ast.Call) and isinstance(over.func, ast.Name) else [over]
        targets = target.elts[-len(values) :] if isinstance(target, ast.Tuple) else [target]
        for one, value in zip(targets, values, strict=False):
            self._assign(one, self._type_of(value))

    def _type_of(self, node: ast.expr) -> str | None:
        name = ast.unparse(node)
        for scope in reversed(self._types):
            if name in scope:
                return scope[name]
        if isinstance(node, ast.Attribute):
            if name == "self.config":  # set by a base class, perhaps in another file
                return "Config"
            owner = self._type_of(node.value)
            if owner in HOLDERS and node.attr == "config":
                return HOLDERS[owner]
            return section_in(SECTIONS[owner].get(node.attr)) if owner is not None and owner in SECTIONS else None
        if isinstance(node, ast.Call):
            return self._returned.get(ast.unparse(node.func).rpartition(".")[2])
        if isinstance(node, ast.Subscript):
            return self._type_of(node.value)
        if isinstance(node, ast.BinOp):
            return self._type_of(node.left) or self._type_of(node.right)
        return None

    @staticmethod
    def annotated(annotation: ast.expr | None) -> str | None:
        names = [n.id for n in ast.walk(annotation) if isinstance(n, ast.Name)] if annotation else []
        return next((name for name in names if name in SECTIONS or name in HOLDERS), None)


def read_keys(sources: Iterator[str]) -> set[tuple[str, str]]:
    found: set[tuple[str, str]] = set()
    trees = [ast.parse(source) for source in sources]
    functions = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    returned = {f.name: section for f in functions if (section := Reader.annotated(f.returns)) in SECTIONS}
    for tree in trees:
        reader = Reader(returned)
        reader.visit(tree)
        reader.visit(tree)  # again: a method may stand before the one that sets the field
        found |= reader.read
    return found


def test_every_key_does_something() -> None:
    """`config/` only reads to refuse: that is not a use."""
    read = read_keys(p.read_text() for p in PACKAGE.rglob("*.py") if p.parent.name != "config")
    unread = [
        f"{section}.{name}" for section, hints in SECTIONS.items() for name in hints if (section, name) not in read
    ]
    assert unread == []


@pytest.mark.parametrize(
    ("code", "read"),
    [
        ("def f(c: TrainConfig): return c.steps", {("TrainConfig", "steps")}),
        ("def f(c: RunConfig): return c.steps", {("RunConfig", "steps")}),
        ("def f(c): return c.steps", set()),
        (
            "def f(config: Config):\n t, r = config.train, 1\n return t.shard",
            {("Config", "train"), ("TrainConfig", "shard")},
        ),
        ("def f(x: DataConfig): return [s.size for s in x.train]", {("DataConfig", "train"), ("SourceConfig", "size")}),
        ("def f(x: Sequence[SourceConfig]):\n for i, s in enumerate(x): s.seed", {("SourceConfig", "seed")}),
        (
            "class A:\n def g(self): return self._config.workers\n"
            " def __init__(self, config: RewardConfig): self._config = config",
            {("RewardConfig", "workers")},
        ),
    ],
)
def test_the_reader_follows_types_and_not_names(code: str, read: set[tuple[str, str]]) -> None:
    assert read_keys(iter([code])) == read
