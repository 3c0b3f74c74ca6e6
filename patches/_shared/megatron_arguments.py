"""Megatron's arguments before its validation: defaults that need a missing package, mistakes found late.

Defaults that need Transformer Engine or Apex are replaced and logged. Values set by flag that need them, and arguments
on which Megatron would fail late with a traceback on every rank, raise an error.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import importlib.machinery
import importlib.util
import itertools
import math
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from mindspeed_lite.engine import OptionError


class Default(NamedTuple):
    """An argument whose value may need something that is missing.

    Attributes:
        demanding, instead: the value that needs it; the value that does not, which `flag` sets.
        needs, module: what it needs, in words; its module, which is for CUDA, or empty for a compiler.
        stand_in: dest of the feature's flag that replaces it, or empty.
    """

    dest: str
    demanding: Any
    instead: Any
    flag: str
    needs: str
    module: str
    stand_in: str = ""

    def is_missing(self, device: str) -> bool:
        if not self.module:
            return device == "cpu" and not _has_compiler()
        if device != "cuda":
            return self.module != _TE or not _computes_without_cuda()
        # Modules provided by a session have no loader.
        found = importlib.util.find_spec(self.module)
        return getattr(found, "loader", found) is None or (self.module == _TE and import_error() is not None)


def fused_adam(device: str) -> str:
    """The package whose FusedAdam Megatron takes; "" if it takes torch's Adam."""
    packages = {"Transformer Engine": Default("", "", "", "", "", _TE), "Apex": Default("", "", "", "", "", "apex")}
    return next((name for name, each in packages.items() if not each.is_missing(device)), "")


def _computes_without_cuda() -> bool:
    """Whether Transformer Engine's extension is a Python module: the compiled one needs CUDA."""
    found = importlib.util.find_spec("transformer_engine_torch")
    return isinstance(getattr(found, "loader", None), importlib.machinery.SourceFileLoader)


@functools.cache  # a second attempt may fail in another way
def import_error() -> Exception | None:
    """Why Transformer Engine cannot be imported; None if it can, or is not there."""
    try:
        if importlib.util.find_spec(_TE) is not None:
            importlib.import_module(f"{_TE}.pytorch")
    except Exception as error:  # its own checks raise what they like
        return error
    return None


def _needed(default: Default, device: str) -> str:
    error = import_error() if default.dest == "transformer_impl" and device == "cuda" else None
    return default.needs if error is None else f"{default.needs}, whose import fails ({type(error).__name__}: {error})"


def _has_compiler() -> bool:
    # Same lookup as torch/_inductor/config.py (cpp.cxx).
    return shutil.which(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")) is not None


_TE, _WGRAD, _SOFTMAX = "transformer_engine", "fused_weight_gradient_mlp_cuda", "scaled_masked_softmax_cuda"
DEFAULTS = (
    Default("transformer_impl", _TE, "local", "--transformer-impl local", "Transformer Engine", _TE),
    Default("apply_rope_fusion", True, False, "--no-rope-fusion", "Transformer Engine's rotary kernel", _TE),
    Default("gradient_accumulation_fusion", True, False, "--no-gradient-accumulation-fusion",
            "Apex's fused weight-gradient kernel", _WGRAD, "use_gradient_accumulation_fusion"),
    Default("no_persist_layer_norm", False, True, "--no-persist-layer-norm", "Apex's persistent layer norm", "apex"),
    Default("persist_layer_norm", True, False, "--no-persist-layer-norm", "Apex's persistent layer norm", "apex"),
    Default("masked_softmax_fusion", True, False, "--no-masked-softmax-fusion",
            "Megatron's fused softmax extension", _SOFTMAX, "use_masked_softmax_fusion"),
    Default("disable_jit_fuser", False, True, "--disable-jit-fuser", "a C++ compiler for torch.compile", ""),
)  # fmt: skip

# Fields of Megatron's MLATransformerConfig without a flag, with its defaults; it reads them from the arguments.
_LATENT_YARN = {"--beta-fast": 32.0, "--beta-slow": 1.0, "--original-max-position-embeddings": 4096}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add flags for fields of Megatron's configuration that have none."""
    from megatron.core.transformer import MLATransformerConfig

    group = parser.add_argument_group("YaRN of multi-latent attention")
    fields = {_flag(field.name) for field in dataclasses.fields(MLATransformerConfig)}
    for flag, default in _LATENT_YARN.items():
        if flag in fields and flag not in parser._option_string_actions:
            text = f"default: {default:g}"
            group.add_argument(flag, type=type(default), default=argparse.SUPPRESS, help=text)


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
    if not getattr(args, "disable_jit_fuser", False) or device != "cpu" or _has_compiler():
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

    switches = [
        (holder, default)
        for holder, default in itertools.product(megatron.argument_holders(args), DEFAULTS)
        if getattr(holder, default.dest, default.instead) == default.demanding
        and not (default.stand_in and getattr(args, default.stand_in, False))
        and default.is_missing(device)
    ]
    for _, default in switches:
        # Other values are Megatron's defaults, which no flag asks for.
        if default.dest == "transformer_impl" and default.dest in explicit:
            raise OptionError(
                f"--transformer-impl {_TE} needs {_needed(default, device)}. Leave the flag out or "
                f"write {default.flag}, or install what is missing."
            )
    for holder, default in switches:
        setattr(holder, default.dest, default.instead)
    return {f"{each.flag} set: Megatron's default needs {_needed(each, device)}": each.dest for _, each in switches}


_LAYOUT = ("tensor_model", "pipeline_model", "context")
_PREFIXES = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
_FILES = ("data_args_path", "per_split_data_args_path")


# Megatron's validation asserts one of each, without naming it.
_REQUIRED = (
    ("num_layers", "encoder_num_layers", "hybrid_layer_pattern", "hybrid_override_pattern"),
    ("hidden_size",),
    ("num_attention_heads",),
    ("seq_length", "encoder_seq_length"),
    ("max_position_embeddings",),
    ("micro_batch_size",),
)


def check_arguments(args: Mapping[str, Any]) -> None:
    """Raise one OptionError with all problems."""
    problems = [*_missing(args), *_attention(args), *_processes(args), *_data(args)]
    if problems:
        raise OptionError(" ".join(problems))


def _missing(args: Mapping[str, Any]) -> Iterator[str]:
    flags = [
        _flag(names[0]) for names in _REQUIRED if names[0] in args and all(args.get(name) is None for name in names)
    ]
    if flags:
        yield f"{', '.join(flags)}: not given, and Megatron needs {'them' if len(flags) > 1 else 'it'}."


def _attention(args: Mapping[str, Any]) -> Iterator[str]:
    if args.get("transformer_impl") != "local":
        return
    if variant := args.get("experimental_attention_variant"):
        yield (
            f"--experimental-attention-variant {variant}: Megatron builds it with Transformer Engine only. Install "
            "Transformer Engine and leave --transformer-impl out."
        )
    backend = getattr(args.get("attention_backend"), "name", args.get("attention_backend"))
    is_served = (
        args.get("use_flash_attn") or args.get("mindspeed_lite_auto") or backend in ("flash", "fused")
        or args.get("context_parallel_size", 1) > 1
    )  # fmt: skip
    if args.get("multi_latent_attention") and not is_served:
        yield "--multi-latent-attention: Megatron's local implementation cannot build it. Add --use-flash-attn."


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
