"""Replaces Megatron's defaults that demand a package which is not installed.

Megatron's plain defaults name Transformer Engine and Apex; without them the script stops before it starts. A
default is switched to what this machine has, with a notice that names the flag. A value the user asked for by flag
is never switched: that is an error which says what is missing.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed_lite.engine import Context, OptionError


@dataclass(frozen=True)
class Default:
    """One argument whose value may demand something absent.

    Attributes:
        dest: name in Megatron's arguments.
        demanding: the value that demands it.
        instead: the value that does not.
        flag: how a user writes `instead`.
        asking: how a user writes `demanding`; empty if it can only be the default.
        missing: given the device, what is missing (a phrase), or None if it is there.
        needs: what the demanding value needs, for the docs.
        when: in which environments it is missing, for the docs.
        stand_in: dest of our flag that supplies what is missing; empty if there is none.
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


def _absent(module: str) -> bool:
    # What we have put there ourselves, for features of an earlier session, has no loader.
    found = importlib.util.find_spec(module)
    return getattr(found, "loader", found) is None


def _transformer_engine(device: str) -> str | None:
    if device != "cuda":
        return f"Transformer Engine, which has no {device} kernels"
    return "Transformer Engine" if _absent("transformer_engine") else None


def _rope_kernel(device: str) -> str | None:
    return _transformer_engine(device)


def _wgrad_kernel(device: str) -> str | None:
    if device != "cuda":
        return f"Apex's fused weight-gradient kernel, which has no {device} form"
    return "Apex's fused weight-gradient kernel" if _absent("fused_weight_gradient_mlp_cuda") else None


def _apex(device: str) -> str | None:
    return "Apex's persistent layer norm" if device != "cuda" or _absent("apex") else None


def _softmax_kernel(device: str) -> str | None:
    if device != "cuda" or _absent("scaled_masked_softmax_cuda"):
        return "Megatron's fused softmax extension"
    return None


def _compiler(device: str) -> str | None:
    if device != "cpu":
        return None
    # As torch's inductor looks for it (torch/_inductor/config.py, cpp.cxx).
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
        "apply_rope_fusion", True, False, "--no-rope-fusion", "", _rope_kernel, "Transformer Engine's rotary kernel"
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
    # The same in a YAML file.
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

# Switches that Megatron's validation refuses for the local implementation and that a feature of ours makes work there.
REFUSED = ("delay_wgrad_compute",)


def hide(args: Any) -> list[str]:
    """Turn off in `args` what Megatron's validation refuses and a feature of ours makes work; returns the names."""
    local = getattr(args, "transformer_impl", "") == "local"
    hidden = [dest for dest in REFUSED if local and getattr(args, dest, False)]
    for dest in hidden:
        setattr(args, dest, False)
    return hidden


def disable_compile(args: Any, device: str) -> Callable[[], None] | None:
    """Make `--disable-jit-fuser` hold for functions that Megatron decorated before it parsed its arguments.

    Megatron applies torch.compile when its modules are imported, before it reads the flag. Without a C++ compiler each
    of these functions fails at its first call, so all of torch.compile is told to run functions as they are written.

    Returns:
        What takes it back, or None if nothing had to be done: the flag is not set, or a compiler is there.
    """
    if not getattr(args, "disable_jit_fuser", False) or _compiler(device) is None:
        return None
    import torch

    stance = torch.compiler.set_stance("force_eager")
    return lambda: stance.__exit__(None, None, None)


def switch(args: Any, device: str, explicit: Collection[str]) -> dict[str, str]:
    """Set every default that demands something absent to what is there; returns notices, each with its dest.

    Args:
        args: Megatron's arguments before validation; changed in place.
        device: the active device's name.
        explicit: dests that the user gave by flag.

    Raises:
        OptionError: the user asked by flag for something absent; `args` is unchanged then.
    """
    # The doctor reads the table without torch.
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


def explicitly_disabled_reasons(context: Context, argument: str, flag: str) -> list[str]:
    """Why the user does not want a fusion: `flag`, which makes `argument` false, or a YAML file that says so."""
    reasons = []
    if argument in context.explicit and not context.arg(argument, True):
        reasons.append(f"{flag} is given")
    if any(getattr(part, argument, True) is False for part in _sections(context)):
        reasons.append(f"`{argument}` is false in the arguments of the YAML file, which this flag does not change")
    return reasons


def reenable_default(context: Context, argument: str) -> Mapping[str, Any]:
    """Megatron's `argument` as true again, which may have been switched off for lack of what the feature supplies.

    Nothing without the script's arguments, and nothing with a YAML file, which decides itself.
    """
    return {} if context.host_args is None or _sections(context) else {argument: True}


def _sections(context: Context) -> list[Any]:
    """Where the arguments of a YAML file have the model's fields."""
    from mindspeed_lite.platform import megatron

    found = (context.arg(name) for name in megatron.SECTIONS)
    return [section for section in found if section is not None]
