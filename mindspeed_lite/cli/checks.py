"""What doctor looks at, a function a subject.

A check imports no Megatron, survives the absence of everything it asks about, and returns rows; what it
raises all the same becomes a problem row, never a traceback.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import json
import os
import platform as python_platform
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from mindspeed_lite import platform
from mindspeed_lite.platform import allocator

Status = Literal["ok", "note", "problem"]

_PYTHON = (3, 10)
_TORCH = (2, 6)
_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
# Import name -> the name to install it by.
_OURS = {"wrapt": "wrapt", "packaging": "packaging"}
_TRAINING = {
    "einops": "einops",
    "numpy": "numpy",
    "pydantic": "pydantic",
    "yaml": "pyyaml",
    "regex": "regex",
    "six": "six",
}
_VARIABLES = (platform.DEVICE_VARIABLE, "MINDSPEED_LITE_DISABLE", allocator.ALLOCATOR_VARIABLE)


@dataclass(frozen=True)
class Row:
    """One finding; `fix` says how to get what is missing."""

    check: str
    status: Status
    text: str
    fix: str = ""


def ok(check: str, text: str) -> Row:
    """As it should be."""
    return Row(check, "ok", text)


def note(check: str, text: str, fix: str = "") -> Row:
    """Worth knowing; training starts all the same."""
    return Row(check, "note", text, fix)


def problem(check: str, text: str, fix: str) -> Row:
    """In the way of training; `fix` says what to do."""
    return Row(check, "problem", text, fix)


def examine() -> list[Row]:
    """Every check's rows, in the order in which a person would ask."""
    rows: list[Row] = []
    for name, check in CHECKS.items():
        try:
            with warnings.catch_warnings():
                # What a probed library warns about is in its reasons, or none of the user's business here.
                warnings.simplefilter("ignore")
                rows += check()
        except Exception as error:  # a library broken in a way nobody thought of
            if isinstance(error, ModuleNotFoundError) and error.name in _OURS:
                rows.append(note(name, f"cannot be told without {error.name}", "see own packages"))
            else:
                rows.append(problem(name, f"cannot be examined: {_said(error)}", "report this with the text"))
    return rows


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a parent that is broken, or a stub without a spec
        return False


def _series(version: str) -> tuple[int, ...]:
    return tuple(int(each) for each in re.findall(r"\d+", version)[:2])


@functools.cache
def _torch() -> tuple[Any, str]:
    """torch, or None and why it does not import."""
    try:
        return importlib.import_module("torch"), ""
    except Exception as error:  # also what its device extensions raise while it loads them
        return None, _said(error)


@functools.cache
def _device() -> tuple[str, list[tuple[str, list[str]]], str]:
    """The device a run would choose or "", every candidate with its reasons, and the error or ""."""
    candidates = []
    for name in platform.device_names():
        try:
            reasons = platform.device(name).available()
        except Exception as error:
            reasons = [f"its check failed: {_said(error)}"]
        candidates.append((name, reasons))
    asked = os.environ.get(platform.DEVICE_VARIABLE) or "auto"
    if asked != "auto" and asked not in dict(candidates):
        return "", candidates, f"{platform.DEVICE_VARIABLE}={asked!r} is not a device"
    for name, reasons in candidates:
        if asked in ("auto", name) and not reasons:
            return name, candidates, ""
    return "", candidates, f"{platform.DEVICE_VARIABLE}={asked} asks for a device that cannot be used"


def _device_name() -> str:
    """The chosen device, or where torch cannot say, the one that is always there."""
    return (_device()[0] if _torch()[0] is not None else "") or "cpu"


@dataclass(frozen=True)
class _Host:
    """The Megatron an import would find: version and folder of `core`, folder of `training`."""

    version: str
    core: Path
    training: Path | None


@functools.cache
def _host() -> _Host | None:
    spec = importlib.util.find_spec("megatron")
    folders = [Path(each) for each in (spec.submodule_search_locations or ())] if spec is not None else []

    def holder(name: str) -> Path | None:
        return next((each / name for each in folders if (each / name / "__init__.py").is_file()), None)

    core = holder("core")
    if core is None or not (core / "package_info.py").is_file():
        return None
    version = str(runpy.run_path(str(core / "package_info.py"))["__version__"])
    return _Host(version, core, holder("training"))


def check_python() -> list[Row]:
    version = python_platform.python_version()
    where = f"{version} at {sys.executable}"
    if sys.version_info < _PYTHON:
        return [problem("python", where, "install Python 3.10 or newer")]
    return [ok("python", where)]


def check_torch() -> list[Row]:
    torch, error = _torch()
    minimum = ".".join(map(str, _TORCH))
    if torch is None:
        if not _is_there("torch"):
            return [problem("torch", "not installed", f"pip install 'torch>={minimum}'")]
        fix = (
            "if an extension named there is not for this torch: install the matching one, or leave it out by "
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0; else reinstall torch"
        )
        return [problem("torch", f"installed but does not import: {error}", fix)]
    built = torch.version.cuda or torch.version.hip
    text = f"{torch.__version__}, built {f'for CUDA or ROCm {built}' if built else 'without CUDA'}"
    if _series(str(torch.__version__)) < _TORCH:
        return [problem("torch", f"{text}: too old", f"pip install 'torch>={minimum}'")]
    return [ok("torch", text)]


def check_own_packages() -> list[Row]:
    missing = [package for module, package in _OURS.items() if not _is_there(module)]
    if missing:
        fix = f"pip install {' '.join(missing)}"
        return [problem("own packages", f"{', '.join(missing)} not installed", fix)]
    return [ok("own packages", ", ".join(_OURS))]


def check_megatron() -> list[Row]:
    host = _host()
    if host is None:
        fix = (
            "pip install megatron-core, or put a Megatron-LM checkout first on PYTHONPATH; "
            "a checkout's own script finds it without"
        )
        return [problem("megatron-core", "not found", fix)]
    rows = [_version_row(host)]
    if host.training is None:
        rows.append(
            note(
                "megatron.training",
                f"not beside megatron.core {host.version}: the training loop and its flags are missing "
                "(0.16 wheels lack them); mindspeed_lite.enable(...) works without",
                "run a script of a Megatron-LM checkout: its folder has both",
            )
        )
    elif host.training.parent != host.core.parent:
        rows.append(
            problem(
                "megatron.training",
                f"at {host.training}, megatron.core {host.version} at {host.core}: two are mixed",
                "take one of them off PYTHONPATH or uninstall it",
            )
        )
    else:
        rows.append(ok("megatron.training", "there"))
    return rows


def _version_row(host: _Host) -> Row:
    where = f"{host.version} at {host.core}"
    try:
        releases = _verified_releases()
    except Exception as error:
        return note("megatron-core", f"{where}; which releases are verified cannot be read: {_said(error)}")
    verified = f"verified releases: {', '.join(releases)}"
    lowest, highest = (".".join(map(str, _series(each))) for each in (releases[0], releases[-1]))
    if _series(host.version) < _series(releases[0]):
        fix = f"pip install 'megatron-core>={lowest}', or check out such a release"
        return problem("megatron-core", f"{where}: older than the supported {lowest} to {highest}", fix)
    if host.version in releases:
        return ok("megatron-core", f"{where}; {verified}")
    if any(_series(each) == _series(host.version) for each in releases):
        return ok("megatron-core", f"{where}: in a verified series, each target is compared; {verified}")
    text = f"{where}: not verified; a feature whose target has changed is skipped; {verified}"
    return note("megatron-core", text)


def _verified_releases() -> list[str]:
    patches = importlib.import_module("mindspeed_lite.patches")

    known = json.loads((Path(patches.__path__[0]) / "fingerprints.json").read_text(encoding="utf-8"))
    releases = sorted(known, key=lambda each: tuple(int(part) for part in re.findall(r"\d+", each)))
    if not releases:
        raise ValueError("it is empty")
    return releases


def check_device() -> list[Row]:
    if _torch()[0] is None:
        return [note("device", "cannot be told without torch", "see torch")]
    chosen, candidates, error = _device()
    listed = "; ".join(f"{name}: {', '.join(reasons) or 'usable'}" for name, reasons in candidates)
    asked = os.environ.get(platform.DEVICE_VARIABLE)
    if not chosen:
        fix = f"unset {platform.DEVICE_VARIABLE}, or set it to one that is usable"
        return [problem("device", f"{error}. {listed}", fix)]
    by = f"by {platform.DEVICE_VARIABLE}" if asked and asked != "auto" else "chosen by availability"
    return [ok("device", f"{chosen} ({platform.device(chosen).describe()}), {by}. {listed}")]


def check_npu_pair() -> list[Row]:
    """torch_npu is built for one series of torch; without either there is nothing to say."""
    try:
        npu = metadata.version("torch_npu")
    except metadata.PackageNotFoundError:
        return []
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = str(getattr(_torch()[0], "__version__", ""))
    if not torch:
        return [note("torch_npu", f"{npu}, without torch", f"install torch {npu} first")]
    if _series(npu) != _series(torch):
        series = ".".join(map(str, _series(torch)))
        fix = f"pip install 'torch-npu=={series}.*' (and the CANN it names), or torch {npu}"
        return [problem("torch_npu", f"{npu} is not for torch {torch}", fix)]
    return [ok("torch_npu", f"{npu} for torch {torch}")]


def check_defaults() -> list[Row]:
    """Which of Megatron's defaults a run would switch, and for want of what."""
    from mindspeed_lite.patches import _defaults

    device = _device_name()
    rows = []
    for default in _defaults.DEFAULTS:
        missing = default.missing(device)
        if missing is not None:
            rows.append(note("megatron default", f"{default.flag} will be set: the default needs {missing}"))
    return rows or [ok("megatron default", "everything that Megatron's defaults ask for is there")]


def check_build_tools() -> list[Row]:
    compiler = _compiler()
    rows = [
        ok("c++ compiler", compiler)
        if compiler
        else note(
            "c++ compiler",
            "none: torch.compile cannot serve the CPU, nor a Megatron checkout build its dataset helper",
            "install g++ or clang++ (apt install g++), or name one in CXX",
        )
    ]
    missing = [] if shutil.which("make") else ["make"]
    missing += [] if _is_there("pybind11") else ["pybind11"]
    missing += [] if compiler else ["a C++ compiler"]
    host = _host()
    folder = None if host is None else host.core / "datasets"
    if folder is not None and not (folder / "Makefile").is_file():
        text = (
            "this megatron-core is a wheel with its dataset helper compiled but without the makefile by which "
            "megatron.training compiles it at every start: on cpu and npu the device layer skips that; on cuda "
            "a script has to (as examples/pretrain_gpt.py does)"
        )
        return [*rows, ok("dataset helper", text)]
    suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
    built = folder is not None and (folder / f"helpers_cpp{suffix}").is_file()
    fix = "apt install make g++, pip install pybind11"
    if missing:
        # make itself is called in any case; with the helper built it has nothing left to do.
        blocked = folder is not None and (not built or "make" in missing)
        text = f"{', '.join(missing)} missing: a Megatron checkout makes its dataset helper at every start"
        return [*rows, Row("dataset helper", "problem" if blocked else "note", text, fix)]
    if folder is None or built:
        return [*rows, ok("dataset helper", "built" if built else "make, pybind11 and a compiler are there")]
    made = _suffix_of_python3_config()
    if made != suffix:
        text = (
            f"python3-config says {made!r}, this Python loads {suffix!r}: make would build the dataset "
            "helper under a name that is not found"
        )
        remedy = f"put this Python's python3-config first on PATH, or once: make -C {folder} LIBEXT={suffix}"
        return [*rows, problem("dataset helper", text, remedy)]
    return [*rows, ok("dataset helper", "make builds it at the first start")]


def _compiler() -> str:
    named = os.environ.get("CXX")
    return (shutil.which(named) if named else shutil.which("g++") or shutil.which("clang++")) or ""


def _suffix_of_python3_config() -> str:
    # As `run` has it: the folder of this Python first.
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    program = shutil.which("python3-config", path=path)
    if program is None:
        return ""
    answer = subprocess.run([program, "--extension-suffix"], capture_output=True, text=True, timeout=30)
    return answer.stdout.strip()


def check_collectives() -> list[Row]:
    torch, _ = _torch()
    if torch is None:
        return [note("collectives", "cannot be told without torch", "see torch")]
    distributed = torch.distributed
    if not distributed.is_available():
        return [problem("collectives", "torch is built without torch.distributed", "install torch from PyPI")]
    there = {
        "gloo": distributed.is_gloo_available(),
        "nccl": distributed.is_nccl_available(),
        "hccl": hasattr(distributed, "ProcessGroupHCCL") or not dict(_device()[1])["npu"],
    }
    needed = _BACKENDS[_device_name()]
    text = ", ".join(f"{name} {'there' if found else 'absent'}" for name, found in there.items())
    if not there[needed]:
        fix = f"install a torch (for hccl: torch_npu) built with {needed}"
        return [problem("collectives", f"{text}; the {_device_name()} device needs {needed}", fix)]
    return [ok("collectives", f"{text}; {needed} serves the {_device_name()} device")]


def check_training_packages() -> list[Row]:
    missing = [package for module, package in _TRAINING.items() if not _is_there(module)]
    if missing:
        text = f"{', '.join(missing)} not installed: Megatron's training script imports them"
        return [problem("script's packages", text, f"pip install {' '.join(missing)}")]
    return [ok("script's packages", ", ".join(_TRAINING.values()))]


def check_allocator() -> list[Row]:
    try:
        choice = allocator.wanted()
    except ValueError as error:
        fix = f"unset it, or set it to {allocator.KEEP} or {allocator.SYSTEM}"
        return [problem("allocator", str(error), fix)]
    if choice == allocator.SYSTEM:
        return [ok("allocator", f"system, by {allocator.ALLOCATOR_VARIABLE}: freed memory goes back at once")]
    if _device_name() != "cpu":
        return [ok("allocator", f"not touched: the device is {_device_name()}")]
    reasons = allocator.why_not()
    if reasons:
        return [note("allocator", f"`mindspeed-lite run` cannot keep freed memory: {'; '.join(reasons)}")]
    return [ok("allocator", "keep: `mindspeed-lite run` keeps freed memory for the next tensor")]


def check_environment() -> list[Row]:
    rows = []
    for name in sorted(each for each in os.environ if each.startswith("MINDSPEED_LITE_")):
        text = f"{name}={os.environ[name]}"
        if name in _VARIABLES:
            off = name == "MINDSPEED_LITE_DISABLE" and os.environ[name].strip().lower() not in _OFF
            rows.append(note("environment", f"{text}: off") if off else ok("environment", text))
        else:
            close = difflib.get_close_matches(name, _VARIABLES, n=1)
            fix = f"did you mean {close[0]}?" if close else f"there are {', '.join(_VARIABLES)}"
            rows.append(note("environment", f"{text} is not a variable of mindspeed_lite", fix))
    return rows or [ok("environment", "no MINDSPEED_LITE_ variable is set")]


_OFF = ("", "0", "false", "no", "off")


def check_features() -> list[Row]:
    """Which features would apply, as far as that shows before the model's arguments are known."""
    if _torch()[0] is None:
        return [note("features", "cannot be read without torch", "see torch")]
    from mindspeed_lite import activation
    from mindspeed_lite.engine import Context, Settings
    from mindspeed_lite.ops import dispatch

    host, device = _host(), _device_name()
    options = (*activation.GENERAL, *activation.catalogue().options())
    versions = {"megatron-core": host.version if host is not None else "not found"}
    context = Context(Settings.of(options, {}), device, versions)
    applying, rows = [], []
    for feature in activation.catalogue():
        reasons = list(feature.condition(context)) if feature.condition is not None else []
        reasons += _drift(feature, host)
        if reasons:
            rows.append(note(f"feature {feature.name}", f"would not apply: {'; '.join(reasons)}"))
            continue
        by = [f"{name}:{dispatch.selected(name, device).backend}" for name in feature.operators]
        applying.append(feature.name + (f" ({', '.join(by)})" if by else ""))
    text = f"{len(applying)} of {len(activation.catalogue())} would apply on {device}, by what is known without "
    text += "the model's arguments"
    return [ok("features", f"{text}: {', '.join(applying)}" if applying else text), *rows]


def _drift(feature: Any, host: _Host | None) -> list[str]:
    """What of the feature's targets is not as it was verified, read from source."""
    from mindspeed_lite import activation
    from mindspeed_lite.engine import FingerprintError, Provide, Replace, matches
    from mindspeed_lite.engine.fingerprints import fingerprint_root, verdict

    if host is None:
        return []
    # As a plan has it: patches of one target are variants for different releases, and one must fit.
    variants: dict[str, list[Any]] = {}
    for patch in feature.patches:
        variants.setdefault(patch.variant_of or patch.target, []).append(patch)
    reasons = []
    for target, group in variants.items():
        fitting = [patch for patch in group if matches(patch.versions, host.version)]
        if not fitting:
            reasons.append(f"no variant of {target} for megatron-core {host.version}")
        for patch in fitting:
            if isinstance(patch, Provide):
                continue
            try:
                live = fingerprint_root(host.core.parent.parent, patch.target)
            except (FingerprintError, SyntaxError, OSError):
                reasons.append(f"{patch.target} is not found")
                continue
            judged = verdict(activation.fingerprints(), patch.target, host.version, live)
            if judged != "verified" and (judged != "same_signature" or isinstance(patch, Replace)):
                reasons.append(f"{patch.target} is not as in the verified releases")
    return reasons


CHECKS: dict[str, Callable[[], list[Row]]] = {
    "python": check_python,
    "torch": check_torch,
    "own packages": check_own_packages,
    "megatron-core": check_megatron,
    "device": check_device,
    "torch_npu": check_npu_pair,
    "megatron default": check_defaults,
    "build tools": check_build_tools,
    "collectives": check_collectives,
    "script's packages": check_training_packages,
    "allocator": check_allocator,
    "environment": check_environment,
    "features": check_features,
}
