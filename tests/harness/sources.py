"""Source files of the repository, their module names and what they import."""

import ast

from tests.harness.checkouts import ROOT

PACKAGE = ROOT / "mindspeed_lite"
FEATURE_FILES = sorted(path for path in (ROOT / "patches").glob("*.py") if not path.name.startswith("_"))


def files(*rooms):
    """Every source file of these rooms (folders or files, relative to the repository)."""
    found = []
    for room in rooms:
        path = ROOT / room
        found += [path] if path.is_file() else sorted(path.rglob("*.py"))
    assert found, rooms
    return found


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = ("mindspeed_lite", *parts) if parts[0] == "patches" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path):
    """Every module that a file imports, at whatever depth and by whatever spelling, by its full name."""
    tree = ast.parse(path.read_text(), str(path))
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            found.add(base)
            # `from package import module` names a module by its last word.
            found |= {f"{base}.{alias.name}" for alias in node.names if is_ours(f"{base}.{alias.name}")}
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                found.add(node.args[0].value)
    return found


def is_ours(name):
    parts = name.split(".")
    base = ROOT.joinpath(*parts) if parts[:2] != ["mindspeed_lite", "patches"] else ROOT.joinpath(*parts[1:])
    return base.with_suffix(".py").is_file() or (base / "__init__.py").is_file()
