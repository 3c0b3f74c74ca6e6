"""Reads what a target looks like, from source alone and as loaded, so that drift is seen before a patch is applied.

A fingerprint has two halves. The signature is what code around a target relies on. The body is what an override relies
on: a hash of the normalised source, of the functions of the same module that it calls and of the autograd functions
that it applies.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from .errors import FingerprintError
from .swaps import original_of
from .target import is_class, namespace, parse, render_signature, top_level, unwrap

_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
# Decorators that wrap a function in no other.
_WITHOUT_LAYER = {"staticmethod", "classmethod", "property", "abstractmethod"}
# Left out so that annotations, comments and the Python that parses make no difference.
_IGNORED_FIELDS = {"annotation", "returns", "type_comment", "type_params", "kind", "ctx"}


@dataclass(frozen=True, eq=False)
class Source:
    """One parsed module: its name, the package its relative imports start from, its text and its file."""

    module: str
    package: str
    tree: ast.Module
    text: str


Reader = Callable[[str], "Source | None"]
Found = tuple[Source, ast.AST]  # a definition and the module that it stands in


@dataclass(frozen=True)
class Fingerprint:
    """What a target looks like: its signature, and a hash of its body."""

    signature: str
    body: str


def reader_of(root: str | Path) -> Reader:
    """Reads modules from a folder that contains their top-level package; imports nothing."""

    def reader(module: str) -> Source | None:
        stem = Path(root, *module.split("."))
        for path, package in ((stem / "__init__.py", module), (stem.with_suffix(".py"), module.rpartition(".")[0])):
            if path.is_file():
                return _parse_file(path, module, package)
        return None

    return reader


def live_reader(module: str) -> Source | None:
    """Reads modules as installed here."""
    try:
        spec = getattr(sys.modules.get(module), "__spec__", None) or importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    package = module if spec.submodule_search_locations is not None else module.rpartition(".")[0]
    if spec.origin and spec.origin.endswith(".py") and Path(spec.origin).is_file():
        return _parse_file(Path(spec.origin), module, package)
    get_source = getattr(spec.loader, "get_source", None)
    try:
        text = get_source(module) if get_source else None
    except ImportError:
        return None
    return None if text is None else Source(module, package, ast.parse(text), text)


def _parse_file(path: Path, module: str, package: str) -> Source:
    stat = path.stat()
    return _parse_cached(str(path), module, package, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=64)
def _parse_cached(path: str, module: str, package: str, _mtime: int, _size: int) -> Source:
    text = Path(path).read_text(encoding="utf-8")
    return Source(module, package, ast.parse(text, filename=path), text)


def fingerprint(reader: Reader, target: str) -> Fingerprint:
    """Of a target in the modules that `reader` reads.

    Raises:
        FingerprintError: there is no definition of it.
    """
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
    """Every definition of a target: more than one where the module chooses between them."""
    module, path = parse(target)
    found = list(_locate(reader, module, path, frozenset()))
    if not found:
        raise FingerprintError(f"`{target}` has no definition in the source of `{module}`.")
    return found


def source_text(reader: Reader, target: str) -> str:
    """The source of a target as it is written, with its decorators."""
    pieces = []
    for source, node in definitions(reader, target):
        decorators = getattr(node, "decorator_list", None)
        first = decorators[0].lineno if decorators else node.lineno  # type: ignore[attr-defined]
        pieces.append("\n".join(source.text.splitlines()[first - 1 : node.end_lineno]))  # type: ignore[attr-defined]
    return "\n\n".join(pieces) + "\n"


def foreign_code(target: str, raw: Any) -> str:
    """Why the loaded object is not what its module's source defines, as a clause; "" if it is.

    The code of `raw` must be the compiled code of one of the target's definitions, behind at most as many wrappers as
    that has decorators.
    """
    raw = original_of(raw)
    function = unwrap(raw)
    if not isinstance(function, FunctionType):
        return _foreign_class_code(raw)
    layers = [function]
    while isinstance(inner := layers[-1].__dict__.get("__wrapped__"), FunctionType):
        layers.append(original_of(inner))
    try:
        found = definitions(live_reader, target)
    except (FingerprintError, SyntaxError):
        return "is not in the source of its module"
    own = layers[-1].__code__
    for source, node in found:
        if not isinstance(node, _FUNCTION):
            # An alias or an import from elsewhere, of which the body's hash knows the text.
            return "" if _may_be(source.module, node, raw) else f"was replaced by {_name_of(layers[0])}"
        decorators = node.decorator_list
        first = decorators[0].lineno if decorators else node.lineno
        here = (own.co_name, own.co_firstlineno) == (node.name, first)
        if here and own in _compiled(source.module):
            strange = [each for each in layers[:-1] if not _is_decorators(each, target)]
            most = sum(getattr(each, "id", "") not in _WITHOUT_LAYER for each in decorators)
            if strange or len(layers) - 1 > most:
                return f"is wrapped by {_name_of((strange or layers)[0])}"
            return ""
        if decorators and all(_is_decorators(each, target) for each in layers):
            return ""  # a decorator that hides what it decorates
    return f"was replaced by {_name_of(layers[-1])}"


def _is_decorators(function: FunctionType, target: str) -> bool:
    """Whether a function may be what a decorator of a target's own module has made."""
    top = top_level(_module_of(function))
    return top in (top_level(target), "torch") or top in sys.stdlib_module_names


def _may_be(module: str, node: ast.AST, raw: Any) -> bool:
    """Whether `raw` may be what an assignment assigns: only another name can be looked up."""
    value, names = getattr(node, "value", None), []
    while isinstance(value, ast.Attribute):
        names.append(value.attr)
        value = value.value
    if not isinstance(value, ast.Name):
        return True
    found: Any = sys.modules.get(module)
    for name in (value.id, *reversed(names)):
        found = getattr(found, name, None)
    return bool(found is None or original_of(found) == raw)


def _foreign_class_code(raw: Any) -> str:
    """Of a class, or a method bound to one: whether all its functions are those of its module."""
    owner = getattr(raw, "__self__", raw)
    if not is_class(owner):
        return ""
    compiled = _compiled(owner.__module__)
    for value in list(namespace(owner).values()):
        inner = unwrap(original_of(value))
        if isinstance(inner, FunctionType) and "__wrapped__" not in inner.__dict__ and inner.__code__ not in compiled:
            return f"has other code: {_name_of(inner)}"
    return ""


def _name_of(function: FunctionType) -> str:
    return f"{_module_of(function)}.{function.__code__.co_name}"


def _module_of(function: FunctionType) -> str:
    return str(function.__globals__.get("__name__", "?"))


@functools.lru_cache(maxsize=128)
def _compiled(module: str) -> frozenset[CodeType]:
    """Every code object of a module, from its bytecode cache where that is up to date."""
    loader = getattr(getattr(sys.modules.get(module), "__spec__", None), "loader", None)
    try:
        code = loader.get_code(module)  # type: ignore[union-attr]
    except (AttributeError, ImportError, OSError, SyntaxError):
        return frozenset()
    found: set[CodeType] = set()
    waiting = [] if code is None else [code]  # an extension has none
    while waiting:
        each = waiting.pop()
        found.add(each)
        waiting += [const for const in each.co_consts if isinstance(const, CodeType)]
    return frozenset(found)


def has_attribute(owner: type, name: str) -> bool:
    """Whether instances of a class have an attribute: declared, or assigned in one of its methods."""
    return any(name in _attributes(each) for each in owner.__mro__)


def _attributes(owner: type) -> set[str]:
    """What a class declares and what its own methods assign to their first parameter, by attribute or by name."""
    found = {*namespace(owner), *namespace(owner).get("__annotations__", ())}
    for value in list(namespace(owner).values()):
        function = unwrap(original_of(value))
        while isinstance(getattr(function, "__wrapped__", None), FunctionType):
            function = original_of(function.__wrapped__)
        if isinstance(function, FunctionType) and function.__code__.co_argcount:
            found |= _assigned(function.__code__, function.__code__.co_varnames[0])
    return found


_BY_NAME = {"setattr", "register_buffer", "register_parameter", "add_module", "__setattr__"}


@functools.lru_cache(maxsize=4096)
def _assigned(code: CodeType, first: str) -> frozenset[str]:
    """The attributes of `first` that code sets: `first.x = ...`, `setattr(first, "x", ...)` and the like."""
    import dis

    inner = [_assigned(const, first) for const in code.co_consts if isinstance(const, CodeType)]
    if not code.co_names:
        return frozenset().union(*inner)
    steps = [each for each in dis.get_instructions(code) if each.opname not in ("CACHE", "PRECALL", "PUSH_NULL")]
    # One instruction may load two variables, of which the last is nearest.
    loads = [each.argval[-1] if each.opname.count("LOAD_FAST") > 1 else each.argval for each in steps]
    found = set()
    for i, step in enumerate(steps):
        if step.opname == "STORE_ATTR" and i and loads[i - 1] == first:
            found.add(step.argval)
        elif step.opname == "LOAD_CONST" and isinstance(step.argval, str) and i > 1:
            # `first` stands before a method's name or behind a function's.
            called, owner = (loads[i - 1], loads[i - 2]) if loads[i - 2] == first else (loads[i - 2], loads[i - 1])
            if owner == first and isinstance(called, str) and called in _BY_NAME:
                found.add(step.argval)
    return frozenset(found).union(*inner)


def mentions(module: str, name: str) -> bool:
    """Whether the code of a module looks for a name; one that cannot be imported looks for none."""
    with contextlib.suppress(ImportError):
        importlib.import_module(module)
    return any(name in code.co_names or name in code.co_varnames for code in _compiled(module))


def _add_helpers(source: Source, node: ast.AST, found: dict[tuple[str, str], str]) -> None:
    """The functions of the same module that a definition calls, and the classes of which it calls `apply`."""
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
    """All definitions of a path, through imports inside the package and through the bases of classes."""
    source = reader(module)
    if source is None or (module, path) in seen:
        return
    seen |= {(module, path)}
    package = source.package
    for node in _bindings(source.tree.body, path[0]):
        if isinstance(node, ast.ImportFrom):
            origin = next(alias.name for alias in node.names if (alias.asname or alias.name) == path[0])
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            home = ".".join([*base, *([node.module] if node.module else [])])
            inside = list(_locate(reader, home, (origin, *path[1:]), seen)) if _is_near(home, module) else []
            yield from inside or ([(source, node)] if len(path) == 1 else [])
        elif len(path) == 1:
            yield source, node
        elif isinstance(node, ast.ClassDef):
            yield from _locate_member(reader, source, node, path[1:], seen)


def _locate_member(
    reader: Reader, source: Source, node: ast.ClassDef, path: tuple[str, ...], seen: frozenset[Any]
) -> Iterator[Found]:
    own = list(_bindings(node.body, path[0]))
    for each in own:
        if len(path) == 1:
            yield source, each
        elif isinstance(each, ast.ClassDef):
            yield from _locate_member(reader, source, each, path[1:], seen)
    if own:
        return
    for base in node.bases:
        if isinstance(base, ast.Name):
            inherited = list(_locate(reader, source.module, (base.id, *path), seen))
            if inherited:
                yield from inherited
                return


def _is_near(home: str, module: str) -> bool:
    return top_level(home) == top_level(module)


def _bindings(body: list[Any], name: str) -> Iterator[ast.AST]:
    """Statements of one scope that bind `name`, through if, try, with and loops but not into other scopes."""
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
        return render_signature(_arguments(node.args))
    if isinstance(node, ast.ClassDef):
        for name in ("__init__", "__new__"):
            for _, each in _locate(reader, module, (*path, name), frozenset()):
                if isinstance(each, _FUNCTION):
                    return render_signature(_arguments(each.args))
        return "()"
    return ""


def _arguments(args: ast.arguments) -> Iterator[tuple[str, Any, bool]]:
    positional = [*args.posonlyargs, *args.args]
    for index, each in enumerate(positional):
        only = index < len(args.posonlyargs)
        kind = Parameter.POSITIONAL_ONLY if only else Parameter.POSITIONAL_OR_KEYWORD
        yield each.arg, kind, index >= len(positional) - len(args.defaults)
    if args.vararg:
        yield args.vararg.arg, Parameter.VAR_POSITIONAL, False
    for each, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        yield each.arg, Parameter.KEYWORD_ONLY, default is not None
    if args.kwarg:
        yield args.kwarg.arg, Parameter.VAR_KEYWORD, False


def _canonical(node: Any, in_function: bool) -> str:
    """One text per meaning: no docstrings, annotations, comments or layout, the same under every Python."""
    if isinstance(node, list):
        return "[" + ",".join(filter(None, (_canonical(each, in_function) for each in node))) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return ""  # a docstring, or a string that does nothing
    if isinstance(node, ast.JoinedStr):  # Python 3.12 ends a nested format with an empty piece
        pieces = [each for each in node.values if not (isinstance(each, ast.Constant) and each.value == "")]
        node = ast.JoinedStr(pieces)
    if isinstance(node, ast.AnnAssign) and in_function:
        # In a class an annotated name may be a dataclass field; in a function the annotation means nothing.
        return "" if node.value is None else _canonical(ast.Assign([node.target], node.value), in_function)
    in_function = isinstance(node, _FUNCTION) or (in_function and not isinstance(node, ast.ClassDef))
    fields = [
        f"{name}={_canonical(value, in_function)}"
        for name, value in ast.iter_fields(node)
        if name not in _IGNORED_FIELDS and value is not None and value != []
    ]
    return f"{type(node).__name__}({','.join(fields)})"
