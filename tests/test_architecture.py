"""Who may know whom, one name for one feature, and the public surface: rules that no single file can hold."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mindspeed_lite
from mindspeed_lite import activation
from tests.platform.forked import clean_environment

ROOT = Path(__file__).resolve().parents[1]
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


def strings(path):
    """Every string in a file that is not a docstring, pieces of f-strings included."""
    tree = ast.parse(path.read_text(), str(path))
    prose = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose
    ]


def within(name, *packages):
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def ours(path):
    return {name for name in imports(path) if within(name, "mindspeed_lite")}


def test_the_rules_below_see_every_spelling_of_an_import(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    folder = tmp_path / "mindspeed_lite" / "ops"
    folder.mkdir(parents=True)
    for name in ("other", "deep"):
        (folder / f"{name}.py").write_text("")
    path = folder / "file.py"
    path.write_text(
        "import a.b\nfrom c import d\nfrom . import other\nfrom .deep import x\nfrom mindspeed_lite.ops import deep\n"
        "def f():\n    import e\n    importlib.import_module('g.h')\n"
    )
    assert imports(path) == {
        "a.b", "c", "e", "g.h", "mindspeed_lite.ops", "mindspeed_lite.ops.other", "mindspeed_lite.ops.deep",
    }  # fmt: skip


@pytest.mark.parametrize("path", files("mindspeed_lite/engine"), ids=module_name)
def test_the_engine_knows_nothing_but_the_standard_library_wrapt_and_packaging(path):
    for name in imports(path):
        top = name.partition(".")[0]
        allowed = top in sys.stdlib_module_names or top in ("wrapt", "packaging")
        assert allowed or within(name, "mindspeed_lite.engine"), f"{module_name(path)} imports {name}"


@pytest.mark.parametrize("path", files("mindspeed_lite/ops"), ids=module_name)
def test_operators_know_torch_and_at_most_the_platform(path):
    for name in ours(path):
        assert within(name, "mindspeed_lite.ops", "mindspeed_lite.platform"), f"{module_name(path)} imports {name}"
    assert not [name for name in imports(path) if within(name, "megatron")]
    assert not [text for text in strings(path) if re.match(r"megatron[.:]", text)]


@pytest.mark.parametrize("path", files("mindspeed_lite/parallel"), ids=module_name)
def test_parallel_mechanisms_know_torch_operators_and_the_platform(path):
    for name in ours(path):
        assert within(name, "mindspeed_lite.parallel", "mindspeed_lite.ops", "mindspeed_lite.platform"), name
    assert not [name for name in imports(path) if within(name, "megatron")]
    assert not [text for text in strings(path) if re.match(r"megatron[.:]", text)]


@pytest.mark.parametrize("path", files("mindspeed_lite/memory"), ids=module_name)
def test_what_says_where_memory_is_knows_torch_operators_and_the_platform(path):
    for name in ours(path):
        assert within(name, "mindspeed_lite.memory", "mindspeed_lite.ops", "mindspeed_lite.platform"), name
    assert not [name for name in imports(path) if within(name, "megatron")]


@pytest.mark.parametrize("path", files("mindspeed_lite/platform"), ids=module_name)
def test_the_platform_knows_the_engine_and_one_file_of_it_megatron(path):
    for name in imports(path):
        top = name.partition(".")[0]
        known = top in sys.stdlib_module_names or top in ("torch", "torch_npu", "wrapt")
        inside = within(name, "mindspeed_lite.engine", "mindspeed_lite.platform") or name == "mindspeed_lite"
        assert known or inside, f"{module_name(path)} imports {name}"
    if path.name != "megatron.py":
        targets = [text for text in strings(path) if re.match(r"megatron[.:]\w", text)]
        assert not targets, f"{module_name(path)} names {targets}"


@pytest.mark.parametrize("path", files("mindspeed_lite", "patches", "demo"), ids=module_name)
def test_nothing_imports_what_stands_on_top(path):
    top = ("mindspeed_lite.megatron_adaptor", "mindspeed_lite.cli", "mindspeed_lite.bench")
    name = module_name(path)
    if name == "mindspeed_lite.__main__" or within(name, "demo") or within(name, *top):
        return
    assert not [each for each in imports(path) if within(each, *top)]


@pytest.mark.parametrize("path", files("mindspeed_lite/engine", "mindspeed_lite/ops", "mindspeed_lite/platform"),
                         ids=module_name)  # fmt: skip
def test_lower_rooms_know_neither_patches_nor_activation(path):
    assert not [
        each
        for each in imports(path)
        if within(
            each,
            "mindspeed_lite.patches",
            "mindspeed_lite.activation",
            "mindspeed_lite.verify",
            "patches",
            "tests",
            "demo",
        )
    ]


def test_the_verifier_knows_torch_and_the_engine():
    (path,) = files("mindspeed_lite/verify.py")
    for name in imports(path):
        top = name.partition(".")[0]
        known = top in sys.stdlib_module_names or top == "torch"
        assert known or within(name, "mindspeed_lite.engine"), name
    assert not [text for text in strings(path) if re.match(r"megatron[.:]", text)]


def test_a_feature_has_one_name_everywhere():
    names = [path.stem for path in FEATURE_FILES]
    assert names == [feature.name for feature in activation.catalogue()], "patches/ and the catalogue"
    assert sorted(path.stem for path in (ROOT / "docs" / "features").glob("*.md")) == names, "docs/features/"
    for name in names:
        module = importlib.import_module(f"mindspeed_lite.patches.{name}")
        assert module.FEATURE.name == name
        assert (ROOT / "tests" / "patches" / f"test_{name}.py").is_file(), f"tests/patches/test_{name}.py"
        flags = [option.flag for option in module.FEATURE.options]
        assert f"--{name.replace('_', '-')}" in flags
        assert (module.__doc__ or "").startswith(f"`--{name.replace('_', '-')}`: ")
    shared = {path.stem for path in (ROOT / "patches").glob("_*.py") if path.stem != "__init__"}
    tested = {path.stem.removeprefix("test_") for path in (ROOT / "tests" / "patches").glob("test_*.py")}
    assert tested == set(names) | {stem.removeprefix("_") for stem in shared}


def test_every_operator_a_feature_names_exists():
    from mindspeed_lite.ops import dispatch

    for feature in activation.catalogue():
        assert set(feature.operators) <= set(dispatch.OPERATORS), feature.name
    for package in dispatch.OPERATORS.values():
        assert is_ours(package)


SURFACE = {
    "names": ["__version__", "disable", "enable", "enabled", "report"],
    "flags": [
        "--attention-backend",
        "--bias-dropout-fusion",
        "--coc-fused-kernel",
        "--coc-mode",
        "--coc-parallel-num",
        "--delay-wgrad-compute",
        "--gradient-accumulation-fusion",
        "--masked-softmax-fusion",
        "--mindspeed-lite-allow-unverified",
        "--mindspeed-lite-auto",
        "--mindspeed-lite-report",
        "--mindspeed-lite-strict",
        "--mindspeed-lite-verify",
        "--moe-grouped-gemm",
        "--moe-permute-fusion",
        "--moe-router-fusion",
        "--moe-tp-extend-ep",
        "--moe-wgrad-side-stream",
        "--param-gather-once",
        "--quant-states",
        "--recompute-activation-function",
        "--recompute-activation-function-num-layers",
        "--recompute-norm",
        "--recompute-norm-num-layers",
        "--reset-bucket-group-order",
        "--reuse-fp32-param",
        "--swap-attention",
        "--swap-attention-budget",
        "--swap-modules",
        "--swap-optimizer",
        "--swap-optimizer-times",
        "--tp-comm-overlap",
        "--use-ascend-coc",
        "--use-ascend-mc2",
        "--use-flash-attn",
        "--use-fused-adamw",
        "--use-fused-cross-entropy",
        "--use-fused-embedding",
        "--use-fused-layernorm",
        "--use-fused-linear-cross-entropy",
        "--use-fused-rmsnorm",
        "--use-fused-rotary-pos-emb",
        "--use-fused-swiglu",
        "--virtual-optimizer",
    ],
    "environment": [
        "MINDSPEED_LITE_ALLOCATOR",
        "MINDSPEED_LITE_BENCH",
        "MINDSPEED_LITE_CACHE",
        "MINDSPEED_LITE_DEVICE",
        "MINDSPEED_LITE_DISABLE",
        "MINDSPEED_LITE_PRODUCTS",
        "MINDSPEED_LITE_SWAP",
    ],
    "commands": ["bench", "bench-ops", "doctor", "features", "memory", "run"],
}


def test_the_public_surface_is_this_and_nothing_else():
    """A change here is a change for users: it belongs in CHANGELOG.md."""
    from mindspeed_lite import cli

    sources = "\n".join(path.read_text() for path in files("mindspeed_lite", "patches"))
    found = {
        "names": sorted(mindspeed_lite.__all__),
        "flags": sorted(option.flag for option in (*activation.GENERAL, *activation.catalogue().options())),
        "environment": sorted(set(re.findall(r"\bMINDSPEED_LITE_[A-Z]+(?:_[A-Z]+)*\b", sources))),
        "commands": sorted(cli.COMMANDS),
    }
    assert found == SURFACE
    assert all(hasattr(mindspeed_lite, name) for name in mindspeed_lite.__all__)


def python(code, folder, **environment):
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=clean_environment(**environment),
        capture_output=True,
        text=True,
    )


def test_patches_cannot_be_imported_under_another_name():
    ran = python("import patches", ROOT)
    assert ran.returncode != 0
    assert "ImportError: Import this package as mindspeed_lite.patches, not as 'patches'" in ran.stderr


def test_a_bare_checkout_on_the_path_is_enough(tmp_path):
    code = (
        "import mindspeed_lite.patches, sys\n"
        "assert 'torch' not in sys.modules and not any(m.startswith('megatron') for m in sys.modules)\n"
        "from mindspeed_lite.patches import _defaults\n"
        "print(mindspeed_lite.patches.__file__)\n"
    )
    ran = python(code, tmp_path, PYTHONPATH=str(ROOT))
    assert ran.returncode == 0, ran.stderr
    assert Path(ran.stdout.strip()) == ROOT / "patches" / "__init__.py"


def test_importing_the_package_is_free_of_effects(tmp_path):
    code = (
        "import os, sys\n"
        "before = dict(os.environ)\n"
        "import mindspeed_lite\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "assert not loaded & {'torch', 'megatron', 'numpy', 'wrapt', 'packaging'}, loaded\n"
        "assert mindspeed_lite.__version__ and dict(os.environ) == before\n"
    )
    ran = python(code, tmp_path)
    assert ran.returncode == 0 and ran.stdout == "" == ran.stderr, ran.stderr
