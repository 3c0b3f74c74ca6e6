"""Signatures of the real package, for what the stand-in has of it.

`python -m tests.te_contract.signatures FOLDER` records those of an unpacked wheel of transformer-engine.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

RECORDED = Path(__file__).with_name("signatures.json")
# The stand-in's file -> files of the package that define the same names.
FILES = {
    "common/recipe.py": (),
    "pytorch/module/linear.py": ("pytorch/module/linear.py", "pytorch/module/layernorm_linear.py"),
    "pytorch/module/norm.py": ("pytorch/module/layernorm.py", "pytorch/module/rmsnorm.py"),
    "pytorch/module/grouped_linear.py": ("pytorch/module/grouped_linear.py",),
    "pytorch/module/base.py": ("pytorch/module/base.py", "pytorch/module/_common.py"),
    "pytorch/attention/dot_product_attention.py": (
        "pytorch/attention/dot_product_attention/dot_product_attention.py",
    ),
    "pytorch/attention/rope.py": ("pytorch/attention/rope.py",),
    "pytorch/optimizers.py": (
        "pytorch/optimizers/fused_adam.py",
        "pytorch/optimizers/fused_sgd.py",
        "pytorch/optimizers/multi_tensor_apply.py",
    ),
    **{
        f"pytorch/{name}.py": (f"pytorch/{name}.py",)
        for name in (
            "cpu_offload", "cpu_offload_v1", "cross_entropy", "distributed", "permutation", "quantization", "router",
        )
    },
}  # fmt: skip
# Functions of the compiled extension, a class without arguments of its own, and what the stand-in alone has.
UNRECORDED = {
    "multi_tensor_scale", "multi_tensor_scale_tensor", "multi_tensor_l2norm",
    "Recipe.__init__", "ExtraState.get_extra_state", "ExtraState.set_extra_state",
    "Linear.delayed_parameters", "GroupedLinear.delayed_parameters",
    *(
        f"TransformerEngineBaseModule.{name}"
        for name in ("set_parallelism", "add_parameter", "mark_parallel", "weight_gradient", "placeholder",
                     "delayed_parameters")
    ),
    "normalize", "LayerNorm.forward", "RMSNorm.forward",
    "size_of", "gather", "reduce", "reduce_scatter", "Gather.forward", "Gather.backward",
}  # fmt: skip
Signatures = dict[str, str]


def _of(path: Path) -> Signatures:
    """Name or `Class.method` -> its arguments with their defaults; a class has the methods of a private base."""
    found: Signatures = {}
    tree = ast.parse(path.read_text())
    classes = {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}
    for node in tree.body:
        members: list[ast.stmt] = node.body if isinstance(node, ast.ClassDef) else [node]
        for base in node.bases if isinstance(node, ast.ClassDef) else ():
            if isinstance(base, ast.Name) and base.id.startswith("_"):
                members = [*members, *classes.get(base.id, ())]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for each in members:
            if isinstance(each, ast.FunctionDef):
                found.setdefault(prefix + each.name, _arguments(each.args))
    return found


def _arguments(given: ast.arguments) -> str:
    plain = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + [*given.defaults]
    pairs = [*zip(plain, defaults, strict=True), *zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return ", ".join(f"{name.arg}{_value(value)}" for name, value in pairs if name.arg != "self")


def _value(default: ast.expr | None) -> str:
    """A default as text, torch's `required` as none; `1` and `1.0` are equal."""
    text = "required" if default is None else ast.unparse(default)
    if text == "required":
        return ""
    try:
        return f"={float(text)}"
    except ValueError:
        return f"={text}"


def _public(name: str) -> bool:
    last = name.rpartition(".")[2]
    return not name.startswith("_") and (not last.startswith("_") or last in ("__init__", "__call__"))


def of_stand_in(folder: Path) -> dict[str, Signatures]:
    """Signatures of a stand-in, by file."""
    root = folder / "transformer_engine"
    return {file: {name: each for name, each in _of(root / file).items() if _public(name)} for file in FILES}


def differences(recorded: dict[str, Signatures], folder: Path) -> list[str]:
    """What a stand-in has otherwise than the package of the record."""
    found = []
    for file, signatures in of_stand_in(folder).items():
        theirs = recorded.get(f"transformer_engine/{file}", {})
        for name, arguments in signatures.items():
            if name not in theirs and name not in UNRECORDED:
                found.append(f"{file}: {name} is not in the record, nor in UNRECORDED")
            elif name in theirs and arguments != theirs[name]:
                found.append(f"{file}: {name} takes ({arguments}), and there ({theirs[name]})")
    return found


def record(package: Path) -> dict[str, Signatures]:
    """Signatures of an unpacked wheel, of what the stand-in has."""
    found: dict[str, Signatures] = {}
    for file, signatures in of_stand_in(Path(__file__).with_name("stand_in")).items():
        theirs: Signatures = {}
        for each in FILES[file]:
            theirs.update(_of(package / "transformer_engine" / each))
        # A context manager may be a class there.
        theirs = {**{name.removesuffix(".__init__"): each for name, each in theirs.items()}, **theirs}
        kept = {name: theirs[name] for name in signatures if name in theirs and name not in UNRECORDED}
        if kept:
            found[f"transformer_engine/{file}"] = kept
    return found


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(record(Path(sys.argv[1])), indent=1) + "\n")
