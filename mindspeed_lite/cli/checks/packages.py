"""Python, torch and the packages that are needed."""

from __future__ import annotations

import platform as python_platform
import sys

from mindspeed_lite.cli import npu_probe

from . import found
from .row import Row, ok, problem

_PYTHON = (3, 10)
_TORCH = (2, 6)
# Import name -> the name to install it by.
OURS = {"wrapt": "wrapt", "packaging": "packaging"}
TRAINING = {
    "einops": "einops",
    "numpy": "numpy",
    "pydantic": "pydantic",
    "yaml": "pyyaml",
    "regex": "regex",
    "six": "six",
}


def check_python() -> list[Row]:
    version = python_platform.python_version()
    where = f"{version} at {sys.executable}"
    if sys.version_info < _PYTHON:
        return [problem("python", where, "install Python 3.10 or newer")]
    return [ok("python", where)]


def check_torch() -> list[Row]:
    torch, error = found.torch()
    minimum = ".".join(map(str, _TORCH))
    if torch is None:
        if not found.is_there("torch"):
            return [problem("torch", "not installed", f"pip install 'torch>={minimum}'")]
        fix = (
            "if an extension named there is not for this torch: install the matching one, or leave it out by "
            f"{npu_probe.AUTOLOAD}=0; else reinstall torch"
        )
        return [problem("torch", f"installed but does not import: {error}", fix)]
    built = torch.version.cuda or torch.version.hip
    text = f"{torch.__version__}, built {f'for CUDA or ROCm {built}' if built else 'without CUDA'}"
    if found.series(str(torch.__version__)) < _TORCH:
        return [problem("torch", f"{text}: too old", f"pip install 'torch>={minimum}'")]
    if found.is_there("torch_npu") and found.npu().breaks_torch:
        trouble = found.npu().trouble
        assert trouble is not None
        fix = f"{trouble.fix}; to train without NPUs set {npu_probe.AUTOLOAD}=0"
        return [problem("torch", f"{text}: `import torch` fails, for it loads torch_npu: {trouble.what}", fix)]
    return [ok("torch", text)]


def check_own_packages() -> list[Row]:
    missing = [package for module, package in OURS.items() if not found.is_there(module)]
    if missing:
        fix = f"pip install {' '.join(missing)}"
        return [problem("own packages", f"{', '.join(missing)} not installed", fix)]
    return [ok("own packages", ", ".join(OURS))]


def check_training_packages() -> list[Row]:
    missing = [package for module, package in TRAINING.items() if not found.is_there(module)]
    if missing:
        text = f"{', '.join(missing)} not installed: Megatron's training script imports them"
        return [problem("script's packages", text, f"pip install {' '.join(missing)}")]
    return [ok("script's packages", ", ".join(TRAINING.values()))]
