"""Files and command line → `Config`: defaults ← YAML (with inheritance) ← `key=value`. Strict in names and types."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from spmd_rl.config.errors import UserError
from spmd_rl.config.schema import Config

INHERIT = "defaults"  # the key of a YAML file that names the files it builds on


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """The configuration of `path` (a YAML file, or None for the defaults alone) with `overrides` laid over it in order:
    `a.b=value`, or the path of a further YAML file (a recipe).

    Raises UserError (one line: the key, what is wrong, the nearest valid key or the type wanted).
    """
    merged = OmegaConf.create(_read(Path(path), ()) if path is not None else {})
    _check_names(merged, Config, "", str(path))
    for override in overrides:
        merged = _override(merged, override)
    return _to_config(merged)


def to_yaml(config: Config) -> str:
    """The resolved configuration as YAML; `load_config` of it gives `config` again."""
    return OmegaConf.to_yaml(OmegaConf.create(_literal(dataclasses.asdict(config))))


def settings_of(text: str) -> Any:
    """What `to_yaml` wrote, perhaps in an older version, as nested mappings and lists."""
    return OmegaConf.to_container(OmegaConf.create(text), resolve=True)


def _literal(value: Any) -> Any:
    """The same with every `${` in a text marked as no interpolation."""
    if isinstance(value, dict):
        return {key: _literal(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_literal(child) for child in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


class _Loader(yaml.SafeLoader):
    """YAML in which a key stands once: PyYAML takes the last of several in silence."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        for key, _ in node.value:
            if names.count(key.value) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} stands there twice", key.start_mark)
        return super().construct_mapping(node, deep)


def _parse_yaml(text: str) -> Any:
    return yaml.load(text, _Loader)  # noqa: S506, a safe loader


def _read(path: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """The mapping of one file over the files that it inherits from."""
    path = path.resolve()
    if path in seen:
        raise UserError(f"{path}: inherits from itself through {' -> '.join(p.name for p in (*seen, path))}")
    try:
        content = _parse_yaml(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise UserError(f"configuration file {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"configuration file {path}: not UTF-8 text (byte {error.start + 1})") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f":{mark.line + 1}" if mark else ""
        raise UserError(f"{path}{where}: not valid YAML ({getattr(error, 'problem', None) or error})") from None
    except (RecursionError, ValueError) as error:  # an anchor inside of itself; a date that no calendar has
        raise UserError(f"{path}: not valid YAML ({_first_line(error)})") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: a mapping of sections is wanted, not {type(content).__name__}")
    parents = content.pop(INHERIT, [])
    parents = [parents] if isinstance(parents, str) else parents
    if not isinstance(parents, list) or not all(isinstance(parent, str) for parent in parents):
        raise UserError(f"{path}: {INHERIT} wants the path of a YAML file or a list of them, not {parents!r}")
    base = OmegaConf.create({})
    for parent in parents:
        base = OmegaConf.merge(base, _read(path.parent / parent, (*seen, path)))  # type: ignore[assignment]
    try:
        merged = OmegaConf.merge(base, OmegaConf.create(content))
    except (OmegaConfBaseException, RecursionError) as error:
        key = getattr(error, "full_key", None)
        raise UserError(f"{path}: {key + ': ' if key else ''}{_first_line(error)}") from None
    return OmegaConf.to_container(merged)  # type: ignore[return-value]


def _override(merged: DictConfig, override: str) -> DictConfig:
    if "=" not in override and override.endswith((".yaml", ".yml")):
        laid_over = OmegaConf.create(_read(Path(override), ()))
        _check_names(laid_over, Config, "", override)
        return OmegaConf.merge(merged, laid_over)  # type: ignore[return-value]
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"command line: {override!r} is not of the form section.key=value")
    try:
        value = _parse_yaml(text) if text else ""
    except (yaml.YAMLError, ValueError):
        value = text
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value):
        value = float(value)  # YAML 1.1 reads 1e-5 as text
    if _check_path(key) is str and value is not None and not isinstance(value, (dict, list)):
        value = value if isinstance(value, str) else text  # a name such as 7 or 2024-01-01
    try:
        OmegaConf.update(merged, key, value, force_add=True)
    except (OmegaConfBaseException, IndexError, ValueError, RecursionError) as error:
        raise UserError(f"command line: {override!r}: {_first_line(error)}") from None
    _check_names(merged, Config, "", "command line")
    return merged


def _to_config(merged: DictConfig) -> Config:
    _check_types(OmegaConf.to_container(merged), Config, "")
    try:
        structured = OmegaConf.structured(Config)
        _unfreeze(structured)
        whole = OmegaConf.merge(structured, merged)
        return OmegaConf.to_object(whole)  # type: ignore[return-value]
    except MissingMandatoryValue as error:
        key = getattr(error, "full_key", None) or _first_line(error)
        raise UserError(f"{key} is not set: it has no default, so the YAML file or the command line must") from None
    except OmegaConfBaseException as error:
        raise UserError(f"{getattr(error, 'full_key', '') or 'configuration'}: {_first_line(error)}") from None


def _unfreeze(node: Any) -> None:
    """Frozen dataclasses become read-only nodes; merging needs them writable."""
    OmegaConf.set_readonly(node, False)
    children = node.keys() if isinstance(node, DictConfig) else range(len(node))
    for key in children:
        child = node._get_node(key)
        if isinstance(child, (DictConfig, ListConfig)) and not child._is_none() and not child._is_missing():
            _unfreeze(child)


def valid_keys(cls: type = Config, prefix: str = "") -> Iterator[str]:
    """All dotted keys, lists of sections without their index (`data.train.path`)."""
    for name, hint in get_type_hints(cls).items():
        section = _section(hint)
        if section is None:
            yield prefix + name
        else:
            yield from valid_keys(section, f"{prefix}{name}.")


def _section(hint: Any) -> type | None:
    """The dataclass behind a field: the field's own, or that of a list's items."""
    if get_origin(hint) is list:
        hint = get_args(hint)[0]
    return hint if dataclasses.is_dataclass(hint) else None  # type: ignore[return-value]


def _check_path(key: str) -> Any:
    """Refuse an override whose key is not in the schema, before it is put in; the type that its value is to have."""
    parts = [p for p in re.split(r"[.\[\]]+", key) if p and not p.isdigit()]
    cls: Any = Config
    for depth, part in enumerate(parts):
        hints = get_type_hints(cls) if dataclasses.is_dataclass(cls) else {}
        if part not in hints:
            raise _unknown(".".join(parts), "command line")
        hint = hints[part]
        if _section(hint) is None:
            if depth + 1 < len(parts) and get_origin(hint) is not dict:
                raise _unknown(".".join(parts), "command line")
            return hint if depth + 1 == len(parts) else None
        cls = _section(hint)
    return cls


def _unknown(key: str, where: str) -> UserError:
    keys = list(valid_keys())
    by_name = {k.rsplit(".", 1)[-1]: k for k in keys}
    name = key.rsplit(".", 1)[-1]
    near = [by_name[name]] if name in by_name else difflib.get_close_matches(key, keys, 1, 0.5)
    near = near or [by_name[n] for n in difflib.get_close_matches(name, list(by_name), 1, 0.6)]
    hint = f"the nearest valid key is {near[0]} ({_type_name(_hint_of(near[0]))})" if near else "no key is like it"
    return UserError(f"{where}: unknown key {key}; {hint}")


def _hint_of(key: str) -> Any:
    cls: Any = Config
    for part in key.split("."):
        hint = get_type_hints(cls)[part]
        cls = _section(hint)
    return hint


def _check_names(node: Any, cls: type, prefix: str, where: str) -> None:
    hints = get_type_hints(cls)
    for name in node if isinstance(node, DictConfig) else ():
        key = prefix + str(name)
        if name not in hints:
            raise _unknown(key, where)
        section = _section(hints[name])
        if section is None or OmegaConf.is_missing(node, name):
            continue
        child = node._get_node(name)
        if get_origin(hints[name]) is list:
            if not isinstance(child, ListConfig):
                raise UserError(f"{where}: {key} wants a list of sections, each starting with '-'")
            for item in child:
                if not isinstance(item, DictConfig):
                    raise UserError(
                        f"{where}: each item of {key} is a section with keys such as "
                        f"{', '.join(list(get_type_hints(section))[:3])}, not {item!r}"
                    )
                _check_names(item, section, key + ".", where)
        else:
            if not isinstance(child, DictConfig):
                raise UserError(
                    f"{where}: {key} is a section with keys such as "
                    f"{', '.join(list(get_type_hints(section))[:3])}, not a single value"
                )
            _check_names(child, section, key + ".", where)


def _check_types(value: Any, hint: Any, key: str) -> None:
    """Raises UserError where a value is not of the type that the schema wants (`???` and ${...} pass)."""
    if isinstance(value, str) and (value == "???" or "${" in value):
        return
    if dataclasses.is_dataclass(hint):
        hints = get_type_hints(hint)
        for name, child in value.items():
            _check_types(child, hints[name], f"{key}.{name}".lstrip("."))
        return
    origin = get_origin(hint)
    if origin is list:
        if not isinstance(value, list):
            raise UserError(f"{key}: {_type_name(hint)} is wanted, not {value!r}")
        for index, item in enumerate(value):
            _check_types(item, get_args(hint)[0], f"{key}[{index}]")
        return
    right = {
        bool: isinstance(value, bool),
        int: isinstance(value, int) and not isinstance(value, bool),
        float: isinstance(value, (int, float)) and not isinstance(value, bool) or _reads_as_float(value),
        str: isinstance(value, str),
    }.get(hint, isinstance(value, dict) if origin is dict else True)
    if not right:
        raise UserError(f"{key}: {_type_name(hint)} is wanted, not {value!r}")


def _reads_as_float(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return isinstance(value, str)


def _type_name(hint: Any) -> str:
    names = {int: "an integer", float: "a number", str: "a text", bool: "true or false"}
    if get_origin(hint) is list:
        return f"a list ({_type_name(get_args(hint)[0])} each)"
    if get_origin(hint) is dict:
        return "a mapping"
    return names.get(hint, "a section")


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]
