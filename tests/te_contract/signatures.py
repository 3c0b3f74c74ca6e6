"""Signatures of the real package, for what the stand-in has of it.

`python -m tests.te_contract.signatures FOLDER` records those of an unpacked wheel of transformer-engine.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

STAND_IN = Path(__file__).with_name("stand_in")
RECORDED = STAND_IN / "transformer_engine" / "signatures.json"
# The stand-in's module -> files of the package that define the same names, if they are others.
FILES = {
    "module.linear": ("module/linear.py", "module/layernorm_linear.py"),
    "module.norm": ("module/layernorm.py", "module/rmsnorm.py"),
    "module.base": ("module/base.py", "module/_common.py"),
    "attention.dot_product_attention": ("attention/dot_product_attention/dot_product_attention.py",),
    "optimizers": ("optimizers/fused_adam.py", "optimizers/fused_sgd.py", "optimizers/multi_tensor_apply.py"),
}
# Functions of the compiled extension, what other modules of the stand-in take, and what is defined elsewhere there.
UNRECORDED = {
    "multi_tensor_scale", "multi_tensor_scale_tensor", "multi_tensor_l2norm", "normalize", "LayerNorm.forward",
    "RMSNorm.forward",
}  # fmt: skip


def _of(path: Path) -> Iterator[tuple[str, str]]:
    """Functions, and methods as `Class.method`, with their arguments; a class has the methods of a private base."""
    tree = ast.parse(path.read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    for node in tree.body:
        members = [node]
        if isinstance(node, ast.ClassDef):
            names = [each.id for each in node.bases if isinstance(each, ast.Name) and each.id[0] == "_"]
            members = [member for each in (*(classes.get(name, node) for name in names), node) for member in each.body]
        for each in members:
            if isinstance(each, ast.FunctionDef) and (each.name[0] != "_" or each.name in ("__init__", "__call__")):
                for argument in ast.walk(each.args):
                    if isinstance(argument, ast.arg):
                        argument.annotation = None
                yield f"{node.name}.{each.name}" if node is not each else each.name, ast.unparse(each.args)


def modules() -> dict[str, dict[str, str]]:
    """Signatures of the stand-in by module, without those of classes and modules that it alone has."""
    root = STAND_IN / "transformer_engine" / "pytorch"
    found = {".".join(path.relative_to(root).with_suffix("").parts): dict(_of(path)) for path in root.rglob("*.py")}
    return {
        name: {each: text for each, text in signatures.items() if not each.startswith(("_", "ExtraState."))}
        for name, signatures in sorted(found.items())
        if signatures and name not in ("collectives", "ops")
    }


def record(package: Path) -> dict[str, dict[str, str]]:
    """Signatures of an unpacked wheel, of what the stand-in has."""
    found: dict[str, dict[str, str]] = {}
    for name, signatures in modules().items():
        theirs: dict[str, str] = {}
        for file in FILES.get(name, (f"{name.replace('.', '/')}.py",)):
            theirs.update(_of(package / "transformer_engine" / "pytorch" / file))
        for each in sorted({*signatures} - UNRECORDED):
            # A context manager may be a class there.
            text = theirs[each] if each in theirs else theirs[f"{each}.__init__"].removeprefix("self, ")
            found.setdefault(f"transformer_engine.pytorch.{name}", {})[each] = text
    return found


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(record(Path(sys.argv[1])), indent=1) + "\n")
