"""What every target looks like in every release, read from source alone, so that drift is seen in time.

A fingerprint has two halves: the signature, which a wrap relies on, and a hash of the normalised source,
which a replacement relies on. `python -m mindspeed_lite.engine.fingerprints` writes or checks the table.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from inspect import Parameter
from pathlib import Path
from typing import Any, Literal

from packaging.version import Version

from .errors import EngineError, FingerprintError
from .target import parse, render_signature, top_level

Verdict = Literal["verified", "same_signature", "changed", "unknown"]
Source = tuple[ast.Module, str]  # a parsed module and the package its relative imports start from
Reader = Callable[[str], Source | None]

_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
# Left out so that annotations, comments and the Python that parses make no difference.
_IGNORED_FIELDS = {"annotation", "returns", "type_comment", "type_params", "kind", "ctx"}


@dataclass(frozen=True)
class Fingerprint:
    signature: str
    source: str


def fingerprint_source(path: str | Path, qualname: str) -> Fingerprint:
    """Of one definition in one file."""
    tree = _parse(str(path), Path(path).read_text(encoding="utf-8"))
    return _fingerprint(lambda module: (tree, "") if module == "file" else None, f"file:{qualname}")


def fingerprint_root(root: str | Path, target: str) -> Fingerprint:
    """Of a target in a folder that contains its top-level package; imports nothing."""

    def reader(module: str) -> Source | None:
        stem = Path(root, *module.split("."))
        for path, package in (
            (stem / "__init__.py", module),
            (stem.with_suffix(".py"), module.rpartition(".")[0]),
        ):
            if path.is_file():
                return _parse_file(path), package
        return None

    return _fingerprint(reader, target)


def fingerprint_live(target: str) -> Fingerprint | None:
    """Of a target in the package as installed here; None if its source cannot be found."""
    try:
        return _fingerprint(_live_source, target)
    except (FingerprintError, SyntaxError):
        return None


def _live_source(module: str) -> Source | None:
    try:
        spec = getattr(sys.modules.get(module), "__spec__", None) or importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    package = module if spec.submodule_search_locations is not None else module.rpartition(".")[0]
    if spec.origin and spec.origin.endswith(".py") and Path(spec.origin).is_file():
        return _parse_file(Path(spec.origin)), package
    get_source = getattr(spec.loader, "get_source", None)
    try:
        text = get_source(module) if get_source else None
    except ImportError:
        return None
    return None if text is None else (_parse(module, text), package)


def _parse_file(path: Path) -> ast.Module:
    stat = path.stat()
    return _parse_cached(str(path), stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=64)
def _parse_cached(path: str, _mtime: int, _size: int) -> ast.Module:
    return _parse(path, Path(path).read_text(encoding="utf-8"))


def _parse(path: str, text: str) -> ast.Module:
    return ast.parse(text, filename=path)


def _fingerprint(reader: Reader, target: str) -> Fingerprint:
    module, path = parse(target)
    found = list(_locate(reader, module, path, frozenset()))
    if not found:
        raise FingerprintError(f"`{target}` has no definition in the source of `{module}`.")
    signatures = dict.fromkeys(_signature(reader, module, path, node) for node in found)
    text = "\n".join(_canonical(node, False) for node in found)
    return Fingerprint(" | ".join(signatures), hashlib.sha256(text.encode()).hexdigest()[:16])


def _locate(reader: Reader, module: str, path: tuple[str, ...], seen: frozenset[Any]) -> Iterator[ast.AST]:
    """All definitions of a path, through imports inside the package and through the bases of classes."""
    source = reader(module)
    if source is None or (module, path) in seen:
        return
    seen |= {(module, path)}
    tree, package = source
    for node in _bindings(tree.body, path[0]):
        if isinstance(node, ast.ImportFrom):
            origin = next(alias.name for alias in node.names if (alias.asname or alias.name) == path[0])
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            home = ".".join([*base, *([node.module] if node.module else [])])
            inside = list(_locate(reader, home, (origin, *path[1:]), seen)) if _is_near(home, module) else []
            yield from inside or ([node] if len(path) == 1 else [])
        elif len(path) == 1:
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from _locate_member(reader, module, node, path[1:], seen)


def _locate_member(
    reader: Reader, module: str, node: ast.ClassDef, path: tuple[str, ...], seen: frozenset[Any]
) -> Iterator[ast.AST]:
    own = list(_bindings(node.body, path[0]))
    for each in own:
        if len(path) == 1:
            yield each
        elif isinstance(each, ast.ClassDef):
            yield from _locate_member(reader, module, each, path[1:], seen)
    if own:
        return
    for base in node.bases:
        if isinstance(base, ast.Name):
            inherited = list(_locate(reader, module, (base.id, *path), seen))
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
            for each in _locate(reader, module, (*path, name), frozenset()):
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


class Table:
    """Known fingerprints: release -> target -> fingerprint."""

    def __init__(self, entries: Mapping[str, Mapping[str, Fingerprint]] | None = None) -> None:
        self.entries = {version: dict(targets) for version, targets in (entries or {}).items()}

    @classmethod
    def load(cls, path: str | Path) -> Table:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        return cls({v: {name: Fingerprint(**row) for name, row in rows.items()} for v, rows in data.items()})

    def save(self, path: str | Path) -> None:
        rows = {
            version: {target: asdict(found) for target, found in sorted(self.entries[version].items())}
            for version in sorted(self.entries, key=Version)
        }
        Path(path).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")

    def lookup(self, target: str, version: str) -> Fingerprint | None:
        return self.entries.get(version, {}).get(target)

    def versions(self, target: str) -> list[str]:
        return sorted((version for version, rows in self.entries.items() if target in rows), key=Version)

    def verdict(self, target: str, version: str, live: Fingerprint | None = None) -> Verdict:
        """How well the target as it is here is known; without `live`, as the installed source has it."""
        return verdict(self, target, version, live or fingerprint_live(target))


def verdict(table: Table, target: str, version: str, live: Fingerprint | None) -> Verdict:
    """The release itself decides; one that is not in the table may match any of its major.minor series."""
    known = {each: found for each in table.versions(target) if (found := table.lookup(target, each))}
    if live is None or not known:
        return "unknown"
    series = [each for each in known if Version(each).release[:2] == Version(version).release[:2]]
    if live in [known[each] for each in ([version] if version in known else series)]:
        return "verified"
    return "same_signature" if live.signature in {found.signature for found in known.values()} else "changed"


def main(arguments: list[str] | None = None) -> int:
    from .catalogue import Catalogue
    from .feature import Feature, Provide, matches

    parser = argparse.ArgumentParser(
        prog="python -m mindspeed_lite.engine.fingerprints",
        description="Fingerprint every target of the catalogue in several releases of the host.",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--package", help="package with one feature a module")
    source.add_argument("--features", metavar="MODULE:NAME", help="a sequence of features in a module")
    parser.add_argument(
        "--root",
        required=True,
        action="append",
        type=_release,
        metavar="VERSION=DIR",
        help="a release and the folder that contains its top-level package",
    )
    parser.add_argument("--out", required=True, type=Path, help="the table; releases without --root are kept")
    parser.add_argument("--check", action="store_true", help="compare with the table instead of writing it")
    options = parser.parse_args(arguments)
    try:
        if options.package:
            features: Iterable[Feature] = Catalogue.load(options.package)
        else:
            module, _, name = options.features.partition(":")
            features = getattr(importlib.import_module(module), name)
    except (EngineError, ImportError, AttributeError) as error:
        return _fail([str(error)])
    patches = [(each, patch) for each in features for patch in each.patches]
    table = Table.load(options.out) if options.out.exists() else Table()
    problems: list[str] = []
    for version, root in options.root:
        found: dict[str, Fingerprint] = {}
        for feature, patch in patches:
            if isinstance(patch, Provide) or not matches(patch.versions, version):
                continue
            try:
                found[patch.target] = fingerprint_root(root, patch.target)
            except FingerprintError as error:
                problems.append(f"feature `{feature.name}` at {version}: {error}")
        if options.check:
            known = table.entries.get(version, {})
            changed = sorted(t for t in found.keys() | known.keys() if found.get(t) != known.get(t))
            problems += [f"`{target}` at {version}: the table is out of date." for target in changed]
        table.entries[version] = found
    if problems:
        return _fail(problems)
    if not options.check:
        table.save(options.out)
    print(f"{len(table.entries)} releases, {sum(map(len, table.entries.values()))} fingerprints")
    return 0


def _release(text: str) -> tuple[str, str]:
    version, _, root = text.partition("=")
    if not Path(root or "?").is_dir():
        raise argparse.ArgumentTypeError(f"`{text}` is not a release and a folder, such as 1.2.0=/path/to/checkout")
    return str(Version(version)), root


def _fail(problems: list[str]) -> int:
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
