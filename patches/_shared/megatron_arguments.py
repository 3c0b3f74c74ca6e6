"""Megatron's arguments before its validation: defaults that need a missing package, mistakes found late.

Defaults that need Transformer Engine or Apex are replaced and logged; a value that the user set by flag raises an
error. So do arguments on which Megatron would fail late, with a traceback on every rank.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed_lite.engine import OptionError


@dataclass(frozen=True)
class Default:
    """An argument whose value may need a missing package.

    Attributes:
        demanding, asking: the value that needs it; its flag, empty for a default.
        instead, flag: the value that does not; its flag.
        missing: device -> what is missing (a phrase), or None.
        needs, when: text for the docs.
        stand_in: dest of the feature's flag that replaces it, or empty.
    """

    dest: str
    demanding: Any
    instead: Any
    flag: str
    asking: str
    missing: Callable[[str], str | None]
    needs: str
    when: str = "not on CUDA, or not installed"
    stand_in: str = ""


def _cuda_package(module: str, what: str, lacks: str = "") -> Callable[[str], str | None]:
    """What is missing without a package for CUDA; lacks: what other devices do not have."""

    def missing(device: str) -> str | None:
        if device != "cuda":
            return f"{what}, which has no {device} {lacks}" if lacks else what
        # Modules provided by a session have no loader.
        found = importlib.util.find_spec(module)
        return what if getattr(found, "loader", found) is None else None

    return missing


_transformer_engine = _cuda_package("transformer_engine", "Transformer Engine", "kernels")
_wgrad_kernel = _cuda_package("fused_weight_gradient_mlp_cuda", "Apex's fused weight-gradient kernel", "form")
_apex = _cuda_package("apex", "Apex's persistent layer norm")
_softmax_kernel = _cuda_package("scaled_masked_softmax_cuda", "Megatron's fused softmax extension")


def _compiler(device: str) -> str | None:
    if device != "cpu":
        return None
    # Same lookup as torch/_inductor/config.py (cpp.cxx).
    found = shutil.which(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++"))
    return None if found else "a C++ compiler for torch.compile"


DEFAULTS: tuple[Default, ...] = (
    Default(
        "transformer_impl",
        "transformer_engine",
        "local",
        "--transformer-impl local",
        "--transformer-impl transformer_engine",
        _transformer_engine,
        "Transformer Engine",
    ),
    Default(
        "apply_rope_fusion",
        True,
        False,
        "--no-rope-fusion",
        "",
        _transformer_engine,
        "Transformer Engine's rotary kernel",
    ),
    Default(
        "gradient_accumulation_fusion",
        True,
        False,
        "--no-gradient-accumulation-fusion",
        "",
        _wgrad_kernel,
        "Apex's fused weight-gradient kernel",
        stand_in="use_gradient_accumulation_fusion",
    ),
    Default("no_persist_layer_norm", False, True, "--no-persist-layer-norm", "", _apex, "Apex's persistent layer norm"),
    Default("persist_layer_norm", True, False, "--no-persist-layer-norm", "", _apex, "Apex's persistent layer norm"),
    Default(
        "masked_softmax_fusion",
        True,
        False,
        "--no-masked-softmax-fusion",
        "",
        _softmax_kernel,
        "Megatron's fused softmax extension",
        "not on CUDA, or not built",
        "use_masked_softmax_fusion",
    ),
    Default(
        "disable_jit_fuser",
        False,
        True,
        "--disable-jit-fuser",
        "",
        _compiler,
        "a C++ compiler for torch.compile",
        "on CPU, without the compiler that torch.compile looks for (`CXX`, else `g++`)",
    ),
)

# Megatron refuses these for the local implementation; features here serve them.
REFUSED = ("delay_wgrad_compute",)


def hide(args: Any) -> list[str]:
    """Clear the `REFUSED` switches for Megatron's validation; return their names."""
    local = getattr(args, "transformer_impl", "") == "local"
    hidden = [dest for dest in REFUSED if local and getattr(args, dest, False)]
    for dest in hidden:
        setattr(args, dest, False)
    return hidden


def disable_compile(args: Any, device: str) -> Callable[[], None] | None:
    """Disable torch.compile without a C++ compiler or with `--disable-jit-fuser`; return the undo.

    Megatron applies torch.compile at import, before it reads the flag.
    """
    if not getattr(args, "disable_jit_fuser", False) or _compiler(device) is None:
        return None
    import torch

    stance = torch.compiler.set_stance("force_eager")
    return lambda: stance.__exit__(None, None, None)


def switch(args: Any, device: str, explicit: Collection[str]) -> dict[str, str]:
    """Switch defaults that need a missing package, in place; return notices.

    Raises:
        OptionError: the user set such a value by flag; `args` is unchanged then.
    """
    from mindspeed_lite.platform import megatron

    switches = []
    for holder, default in itertools.product(megatron.argument_holders(args), DEFAULTS):
        if getattr(holder, default.dest, default.instead) != default.demanding:
            continue
        if default.stand_in and getattr(args, default.stand_in, False):
            continue
        missing = default.missing(device)
        if missing is None:
            continue
        if default.asking and default.dest in explicit:
            raise OptionError(
                f"{default.asking} needs {missing}. Leave the flag out or write {default.flag}, or install what is "
                "missing."
            )
        switches.append((holder, default, missing))
    notices = {}
    for holder, default, missing in switches:
        setattr(holder, default.dest, default.instead)
        notices[f"{default.flag} set: Megatron's default needs {missing}"] = default.dest
    return notices


_LAYOUT = ("tensor_model", "pipeline_model", "context")
_PREFIXES = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
_FILES = ("data_args_path", "per_split_data_args_path")


def check_arguments(args: Mapping[str, Any]) -> None:
    problem = next(iter((*_processes(args), *_data(args))), None)
    if problem is not None:
        raise OptionError(problem)


def _processes(args: Mapping[str, Any]) -> Iterator[str]:
    sizes = {name: 1 if (size := args.get(f"{name}_parallel_size")) is None else size for name in _LAYOUT}
    wrong = [f"{_flag(name)}-parallel-size {size}: must be at least 1." for name, size in sizes.items() if size < 1]
    yield from wrong
    if wrong:
        return
    wanted, world = math.prod(sizes.values()), args.get("world_size")
    if world and world % wanted:
        flags = " ".join(f"{_flag(name)}-parallel-size {size}" for name, size in sizes.items() if size > 1)
        yield (
            f"{flags}: needs {wanted} processes, or a multiple of them, and this training has {world}. Start it with "
            f"torchrun --nproc-per-node {wanted}, or choose smaller sizes."
        )


def _data(args: Mapping[str, Any]) -> Iterator[str]:
    # Only rank 0 is sure to read data.
    if args.get("mock_data") or os.environ.get("RANK", "0") != "0":
        return
    for name in _FILES:
        path = args.get(name)
        if isinstance(path, str) and not _is_remote(path) and not os.path.exists(path):
            yield f"{_flag(name)} {path}: there is no such file."
    for name in _PREFIXES:
        given = args.get(name)
        for path in given if isinstance(given, (list, tuple)) else ():
            if isinstance(path, str) and not _is_number(path) and not _is_remote(path) and not os.path.exists(path):
                missing = [path + end for end in (".idx", ".bin") if not os.path.exists(path + end)]
                if missing:
                    yield (
                        f"{_flag(name)} {path}: there is no {' and no '.join(missing)}. Give the prefix that "
                        "tools/preprocess_data.py of Megatron-LM wrote, or --mock-data."
                    )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _is_remote(path: str) -> bool:
    return "://" in path


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
