"""What doctor looks at, a file a subject and a function a question.

A check imports no Megatron, survives the absence of everything it asks about, and returns rows; what it
raises all the same becomes a problem row, never a traceback.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

from . import build, devices, environment, features, megatron, packages
from .row import Row, note, problem, said

__all__ = ["CHECKS", "Row", "examine"]

CHECKS: dict[str, Callable[[], list[Row]]] = {
    "python": packages.check_python,
    "torch": packages.check_torch,
    "own packages": packages.check_own_packages,
    "megatron-core": megatron.check_megatron,
    "device": devices.check_device,
    "torch_npu": devices.check_npu,
    "megatron default": megatron.check_defaults,
    "build tools": build.check_build_tools,
    "collectives": devices.check_collectives,
    "script's packages": packages.check_training_packages,
    "allocator": devices.check_allocator,
    "environment": environment.check_environment,
    "features": features.check_features,
}


def examine() -> list[Row]:
    """Every check's rows, in the order in which a person would ask."""
    rows: list[Row] = []
    for name, check in CHECKS.items():
        try:
            with warnings.catch_warnings():
                # What a probed library warns about is in its reasons, or none of the user's business here.
                warnings.simplefilter("ignore")
                rows += check()
        except Exception as error:  # a library broken in an unforeseen way
            if isinstance(error, ModuleNotFoundError) and error.name in packages.OURS:
                rows.append(note(name, f"cannot be told without {error.name}", "see own packages"))
            else:
                rows.append(problem(name, f"cannot be examined: {said(error)}", "report this with the text"))
    return rows
