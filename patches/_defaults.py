"""Megatron's defaults that demand a package which is not there, and what stands in for each.

Megatron's plain defaults name Transformer Engine and Apex; without them the script stops before it starts. A
default is switched to what this machine has, with a notice that names the flag. A value the user asked for by flag
is never switched: that is an error which says what is missing.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from mindspeed_lite.engine import OptionError


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
        stand_in: dest of our flag that supplies what is missing; empty if there is none.
    """

    dest: str
    demanding: Any
    instead: Any
    flag: str
    asking: str
    missing: Callable[[str], str | None]
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
    chosen = os.environ.get("CXX")
    found = shutil.which(chosen) if chosen else (shutil.which("g++") or shutil.which("clang++"))
    return None if found else "a C++ compiler for torch.compile"


DEFAULTS: tuple[Default, ...] = (
    Default(
        "transformer_impl",
        "transformer_engine",
        "local",
        "--transformer-impl local",
        "--transformer-impl transformer_engine",
        _transformer_engine,
    ),
    Default("apply_rope_fusion", True, False, "--no-rope-fusion", "", _rope_kernel),
    Default(
        "gradient_accumulation_fusion",
        True,
        False,
        "--no-gradient-accumulation-fusion",
        "",
        _wgrad_kernel,
        "use_gradient_accumulation_fusion",
    ),
    Default("no_persist_layer_norm", False, True, "--no-persist-layer-norm", "", _apex),
    # The same in a YAML file.
    Default("persist_layer_norm", True, False, "--no-persist-layer-norm", "", _apex),
    Default(
        "masked_softmax_fusion",
        True,
        False,
        "--no-masked-softmax-fusion",
        "",
        _softmax_kernel,
        "use_masked_softmax_fusion",
    ),
    Default("disable_jit_fuser", False, True, "--disable-jit-fuser", "", _compiler),
)

# Switches that Megatron's validation refuses for the local implementation and that a feature of ours makes work there.
REFUSED = ("delay_wgrad_compute",)


@contextlib.contextmanager
def unseen(args: Any) -> Iterator[None]:
    """Within the block Megatron does not see what it refuses and we have."""
    local = getattr(args, "transformer_impl", "") == "local"
    hidden = [dest for dest in REFUSED if local and getattr(args, dest, False)]
    for dest in hidden:
        setattr(args, dest, False)
    try:
        yield
    finally:
        for dest in hidden:
            setattr(args, dest, True)


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
