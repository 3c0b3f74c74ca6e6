"""Reads targets from source, and compares loaded code with it.

A body fingerprint hashes normalised source of the target, functions it calls in its module, and autograd functions it
applies.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from types import FunctionType
from typing import Any

from .errors import FingerprintError, TargetError
from .signatures import render_signature
from .swaps import original_of
from .target import parse, top_level, unwrap

_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
# Independent of annotations, comments and Python release.
_IGNORED_FIELDS = {"annotation", "returns", "type_comment", "type_params", "kind", "ctx"}
_SETTERS = {"setattr", "register_buffer", "register_parameter", "add_module", "__setattr__"}


@dataclass(frozen=True, eq=False)
class Source:
    """One parsed module; relative imports start from `package`."""

    module: str
    package: str
    file: str
    tree: ast.Module
    text: str


Reader = Callable[[str], "Source | None"]
Found = tuple[Source, ast.AST]


@dataclass(frozen=True)
class Fingerprint:
    signature: str
    body: str


def reader_of(root: str | Path) -> Reader:
    def reader(module: str) -> Source | None:
        stem = Path(root, *module.split("."))
        return _parsed(stem / "__init__.py", module) or _parsed(stem.with_suffix(".py"), module)

    return reader


def live_reader(module: str) -> Source | None:
    try:
        spec = getattr(sys.modules.get(module), "__spec__", None) or importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return _parsed(Path(spec.origin), module) if spec is not None and spec.origin else None


def _parsed(path: Path, module: str) -> Source | None:
    if path.suffix != ".py" or not path.is_file():
        return None
    stat = path.stat()
    return _parse(path, module, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=64)
def _parse(path: Path, module: str, _mtime: int, _size: int) -> Source:
    text = path.read_text(encoding="utf-8")
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return Source(module, package, str(path), ast.parse(text, filename=str(path)), text)


def fingerprint(reader: Reader, target: str) -> Fingerprint:
    found = definitions(reader, target)
    module, path = parse(target)
    signatures = dict.fromkeys(_signature(reader, module, path, node) for _, node in found)
    texts = [_canonical(node, False) for _, node in found]
    helpers: dict[tuple[str, str], str] = {}
    for source, node in found:
        _add_helpers(source, node, helpers)
    texts += [helpers[key] for key in sorted(helpers)]
    return Fingerprint(" | ".join(signatures), hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16])


def definitions(reader: Reader, target: str) -> list[Found]:
    module, path = parse(target)
    found = list(_locate(reader, module, path, frozenset()))
    if not found:
        raise FingerprintError(f"`{target}` has no definition in the source of `{module}`.")
    return found


def source_text(reader: Reader, target: str) -> str:
    pieces = []
    for source, node in definitions(reader, target):
        lines = source.text.splitlines()[_first_line(node) - 1 : node.end_lineno]  # type: ignore[attr-defined]
        pieces.append("\n".join(lines))
    return "\n\n".join(pieces) + "\n"


def _first_line(node: Any) -> int:
    decorators = getattr(node, "decorator_list", None)
    return int(decorators[0].lineno if decorators else node.lineno)


# What is loaded


def foreign_code(target: str, raw: Any) -> str:
    """How the loaded object differs from its module's source, as a clause; "" if it does not.

    The innermost code must be the definition's, wrapped only by its decorators.
    """
    raw = original_of(raw)
    owner = getattr(raw, "__self__", raw)  # such as of an autograd function's `apply`
    if isinstance(owner, type):
        functions = (unwrap(original_of(each)) for each in list(vars(owner).values()))
        plain = (each for each in functions if isinstance(each, FunctionType) and not hasattr(each, "__wrapped__"))
        source = live_reader(owner.__module__)
        foreign = (each for each in plain if source is None or each.__code__.co_filename != source.file)
        return next((f"has other code: {_name_of(each)}" for each in foreign), "")
    layers = [unwrap(raw)]
    if not isinstance(layers[0], FunctionType):
        return ""
    while isinstance(inner := vars(layers[-1]).get("__wrapped__"), FunctionType):
        layers.append(original_of(inner))
    code = layers[-1].__code__
    may_decorate = all(_may_decorate(each, target) for each in layers[:-1])
    for source, node in definitions(live_reader, target):
        decorators = getattr(node, "decorator_list", [])
        name = getattr(node, "name", "")
        if (code.co_filename, code.co_name, code.co_firstlineno) == (source.file, name, _first_line(node)):
            return "" if may_decorate and len(layers) <= len(decorators) + 1 else f"is wrapped by {_name_of(layers[0])}"
        # An alias, import or opaque decorator.
        if (decorators or not isinstance(node, _FUNCTION)) and may_decorate and _may_decorate(layers[-1], target):
            return ""
    strange = (each for each in layers if not _may_decorate(each, target))
    return f"was replaced by {_name_of(next(strange, layers[-1]))}"


def _may_decorate(function: FunctionType, target: str) -> bool:
    top = top_level(_module_of(function))
    return top in (top_level(target), "torch") or top in sys.stdlib_module_names


def _name_of(function: FunctionType) -> str:
    return f"{_module_of(function)}.{function.__code__.co_name}"


def _module_of(function: FunctionType) -> str:
    return str(function.__globals__.get("__name__", "?"))


# Names


def has_attribute(owner: type, name: str) -> bool:
    return any(name in attributes(each) for each in owner.__mro__)


def attributes(owner: type) -> set[str]:
    space = vars(owner)
    return {*space, *space.get("__annotations__", ()), *_assigned(live_reader(owner.__module__), owner.__name__)}


@functools.lru_cache(maxsize=1024)
def _assigned(source: Source | None, name: str) -> frozenset[str]:
    found = set()
    classes = [each for each in ast.walk(source.tree) if isinstance(each, ast.ClassDef)] if source else []
    for function in (each for owner in classes if owner.name == name for each in ast.walk(owner)):
        if not isinstance(function, _FUNCTION):
            continue
        first = next((each.arg for each in (*function.args.posonlyargs, *function.args.args)), None)
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id == first:
                    found.add(node.attr)
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in _SETTERS:
                called, *given = (ast.unparse(each) for each in (node.func, *node.args[:2]))
                names = [str(each.value) for each in node.args[:2] if isinstance(each, ast.Constant)]
                if called.startswith((f"{first}.", "super()")) or given[:1] == [first]:
                    found.update(names[:1])
    return frozenset(found)


def mentions(module: str, name: str) -> bool:
    with contextlib.suppress(ImportError, TargetError):
        importlib.import_module(module)
    source = live_reader(module)
    fields = ("id", "attr", "module", "name")
    return source is not None and any(
        name == getattr(node, field, None) for node in ast.walk(source.tree) for field in fields
    )


# Definitions


def _add_helpers(source: Source, node: ast.AST, found: dict[tuple[str, str], str]) -> None:
    for each in ast.walk(node):
        called: ast.AST | None = each.func if isinstance(each, ast.Call) else None
        if isinstance(node, ast.Assign) and each is node.value:
            called = each  # an alias such as `function = Class.apply`
        applied = isinstance(called, ast.Attribute) and called.attr == "apply"
        name = called.value if isinstance(called, ast.Attribute) and applied else called
        if not isinstance(name, ast.Name) or (source.module, name.id) in found:
            continue
        for helper in _bindings(source.tree.body, name.id):
            if helper is not node and isinstance(helper, ast.ClassDef if applied else _FUNCTION):
                found[source.module, name.id] = _canonical(helper, False)
                _add_helpers(source, helper, found)


def _locate(reader: Reader, module: str, path: tuple[str, ...], seen: frozenset[Any]) -> Iterator[Found]:
    source = reader(module)
    if source is None or (module, path) in seen:
        return
    seen |= {(module, path)}
    for node in _bindings(source.tree.body, path[0]):
        if isinstance(node, ast.ImportFrom):
            name = next(alias.name for alias in node.names if (alias.asname or alias.name) == path[0])
            home = importlib.util.resolve_name("." * node.level + (node.module or ""), source.package)
            inside = (
                list(_locate(reader, home, (name, *path[1:]), seen)) if top_level(home) == top_level(module) else []
            )
            yield from inside or ([(source, node)] if len(path) == 1 else [])
        else:
            yield from _locate_inside(reader, source, node, path[1:], seen)


def _locate_inside(
    reader: Reader, source: Source, node: ast.AST, path: tuple[str, ...], seen: frozenset[Any]
) -> Iterator[Found]:
    if not path:
        yield source, node
    elif isinstance(node, ast.ClassDef):
        own = list(_bindings(node.body, path[0]))
        for each in own:
            yield from _locate_inside(reader, source, each, path[1:], seen)
        for base in node.bases if not own else ():
            inherited = (
                list(_locate(reader, source.module, (base.id, *path), seen)) if isinstance(base, ast.Name) else []
            )
            if inherited:
                yield from inherited
                return


def _bindings(body: list[Any], name: str) -> Iterator[Any]:
    for node in body:
        if isinstance(node, (*_FUNCTION, ast.ClassDef)):
            if node.name == name:
                yield node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            if any((alias.asname or alias.name) == name for alias in node.names):
                yield node
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(each, ast.Name) and each.id == name for t in targets for each in ast.walk(t)):
                yield node
        else:
            for field in ("body", "orelse", "handlers", "finalbody", "cases"):
                yield from _bindings(getattr(node, field, []), name)


def _signature(reader: Reader, module: str, path: tuple[str, ...], node: ast.AST) -> str:
    if isinstance(node, _FUNCTION):
        return render_signature(_parameters(node.args))
    if isinstance(node, ast.ClassDef):
        for name in ("__init__", "__new__"):
            for _, each in _locate(reader, module, (*path, name), frozenset()):
                if isinstance(each, _FUNCTION):
                    return render_signature(_parameters(each.args))
        return "()"
    return ""


def _parameters(args: ast.arguments) -> Iterable[Parameter]:
    """As `inspect` sees them, without annotations, each default None."""
    bare = copy.deepcopy(args)
    for each in ast.walk(bare):
        if isinstance(each, ast.arg):
            each.annotation = None
    bare.defaults = [ast.Constant(None) for _ in bare.defaults]
    bare.kw_defaults = [each and ast.Constant(None) for each in bare.kw_defaults]
    body = ast.fix_missing_locations(ast.Expression(ast.Lambda(bare, ast.Constant(None))))
    return inspect.signature(eval(compile(body, "<signature>", "eval"))).parameters.values()


def _canonical(node: Any, in_function: bool) -> str:
    """Normalised text without docstrings, annotations and layout, for every Python."""
    if isinstance(node, list):
        return "[" + ",".join(filter(None, (_canonical(each, in_function) for each in node))) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return ""
    if isinstance(node, ast.JoinedStr):  # Python 3.12 ends a nested format with an empty piece
        pieces = [each for each in node.values if not (isinstance(each, ast.Constant) and each.value == "")]
        node = ast.JoinedStr(pieces)
    if isinstance(node, ast.AnnAssign) and in_function:
        # In a class an annotated name may be a dataclass field; in a function it means nothing.
        return "" if node.value is None else _canonical(ast.Assign([node.target], node.value), in_function)
    in_function = isinstance(node, _FUNCTION) or (in_function and not isinstance(node, ast.ClassDef))
    fields = [
        f"{name}={_canonical(value, in_function)}"
        for name, value in ast.iter_fields(node)
        if name not in _IGNORED_FIELDS and value is not None and value != []
    ]
    return f"{type(node).__name__}({','.join(fields)})"
