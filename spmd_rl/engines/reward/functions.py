"""Reward functions by name: built-in, `package.module:function`, or `path/to/file.py:function`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from spmd_rl.config.errors import UserError
from spmd_rl.engines.reward import builtin

BUILTIN = {
    f.__name__: f for f in (builtin.exact_match, builtin.near_number, builtin.math_verify, builtin.reasoning_gym)
}


@dataclass(frozen=True)
class FunctionSpec:
    """What the configuration says of one function; `name` also labels it in messages."""

    name: str
    args: dict[str, Any] = field(default_factory=dict)
    batched: bool = False


@dataclass(frozen=True)
class RewardFunction:
    """A loaded function. timeout_value: its score for a call that took too long, None where that is an error."""

    spec: FunctionSpec
    call: Callable[..., Any]
    is_async: bool
    timeout_value: float | None

    @classmethod
    def load(cls, spec: FunctionSpec) -> RewardFunction:
        """Raises UserError where there is no such function, or it does not take the arguments it will get."""
        function = _find(spec.name)
        if not callable(function):
            raise UserError(f"reward function {spec.name!r}: is {type(function).__name__}, not a function")
        _check_arguments(function, spec)
        is_async = any(inspect.iscoroutinefunction(f) for f in (function, getattr(function, "__call__", None)))  # noqa: B004
        timeout_value = getattr(function, "timeout_value", None)
        return cls(spec, function, is_async, None if timeout_value is None else float(timeout_value))


def describe(error: BaseException) -> str:
    """One line: what was raised, and where in the user's own code."""
    text = str(error).strip().split("\n")[0]
    own = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    own = [f for f in own if Path(f.filename).parent != Path(__file__).parent] or own
    place = f" ({os.path.relpath(own[-1].filename)}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}{': ' + text if text else ''}{place}"


def _find(name: str) -> Any:
    module_name, colon, attribute = name.rpartition(":")
    if not colon:
        if name in BUILTIN:
            return BUILTIN[name]
        known = ", ".join(BUILTIN)
        raise UserError(
            f"reward function {name!r}: neither a built-in ({known}) nor module:function{_near(name, BUILTIN)}"
        )
    module = _import_file(module_name, name) if module_name.endswith(".py") else _import_module(module_name, name)
    if not hasattr(module, attribute):
        functions = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise UserError(f"reward function {name!r}: {module_name} has no {attribute!r}{_near(attribute, functions)}")
    return getattr(module, attribute)


def _import_module(module: str, name: str) -> ModuleType:
    # Behind all else: a folder of the user's that is called `datasets` must not hide the library.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and (module == error.name or module.startswith(error.name + ".")):
            raise UserError(
                f"reward function {name!r}: no module {error.name!r}, neither installed nor in {os.getcwd()}"
            ) from None
        raise UserError(f"reward function {name!r}: {module} can't be imported: {describe(error)}") from None
    except (Exception, SystemExit) as error:
        raise UserError(f"reward function {name!r}: {module} can't be imported: {describe(error)}") from None


def _import_file(file: str, name: str) -> ModuleType:
    path = Path(file).resolve()
    if not path.is_file():
        raise UserError(f"reward function {name!r}: no file {path}")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # for its own imports of the files beside it
    module_name = f"{path.stem}_{zlib.crc32(str(path).encode()):08x}"  # two files may have one name
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise UserError(f"reward function {name!r}: {path} can't be imported: {describe(error)}") from None
    return module


def _check_arguments(function: Callable[..., Any], spec: FunctionSpec) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C, without a signature: the first call will tell
        return
    kinds = "prompts, responses, rows" if spec.batched else "prompt, response, row"
    try:
        signature.bind(None, None, None, **spec.args)
    except TypeError as error:
        args = "".join(f", {key}={value!r}" for key, value in spec.args.items())
        raise UserError(
            f"reward function {spec.name!r}: {error}; it is called as f({kinds}{args}), but defined as f{signature}"
        ) from None


def _near(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
