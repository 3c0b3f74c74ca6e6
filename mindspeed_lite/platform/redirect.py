"""Reversible attribute changes on torch."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from types import FrameType, FunctionType
from typing import Any

from mindspeed_lite.engine.swaps import replace_function
from mindspeed_lite.engine.target import read, write

# Packages that see the real machine: they plan kernels, probe drivers or choose backends.
MACHINE_PACKAGES = frozenset(
    {"torch", "triton", "torchvision", "torchaudio", "torch_npu", "functorch", "mindspeed_lite"}
)

# Megatron 0.15 compiles an optional CUDA extension on import; without a GPU torch needs this or raises IndexError.
NO_CUDA_EXTENSION = ("TORCH_CUDA_ARCH_LIST", "8.0")


class Redirects(contextlib.ExitStack):
    """Attribute changes, undone in reverse order by `close()`."""

    def default_environment(self, name: str, value: str) -> None:
        if name not in os.environ:
            os.environ[name] = value
            self.callback(os.environ.pop, name, None)

    def set(self, owner: Any, name: str, value: Any) -> None:
        self.callback(write, owner, name, read(owner, name))
        setattr(owner, name, value)

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace a function by `make(original)`.

        A Python function keeps its identity, so that modules which imported it follow.
        """
        own = vars(owner).get(name)
        if isinstance(own, FunctionType):
            replace_function(own, make, self)
        else:
            self.set(owner, name, make(getattr(owner, name)))


_machine_module: dict[str, bool] = {}


def asked_by_machine(frame: FrameType) -> bool:
    """Whether `frame` is torch, or a library that builds no Megatron models; cached by module name."""
    name = frame.f_globals.get("__name__", "")
    known = _machine_module.get(name)
    if known is None:
        top = name.partition(".")[0]
        file = frame.f_code.co_filename
        known = top in MACHINE_PACKAGES or (
            top not in {"megatron", "mbridge", "verl", "__main__", "__mp_main__"}
            and ("site-packages" in file or "dist-packages" in file or top in sys.stdlib_module_names)
        )
        _machine_module[name] = known
    return known


def for_the_host(original: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
    """Call `original` for torch and libraries, `answer` for Megatron and scripts."""
    depth = 2 if isinstance(original, FunctionType) else 1  # its own frame calls the replacement

    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (original if asked_by_machine(sys._getframe(depth)) else answer)(*args, **kwargs)

    chosen.__name__ = getattr(original, "__name__", "chosen")
    chosen.__doc__ = original.__doc__
    return chosen
