"""Diagnoses unusable Ascend NPUs: what is wrong and what to do.

Imports nothing: reads package metadata, error texts and device nodes.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

DEVICE_NODES = Path("/dev")
VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
CANN_HOME = "ASCEND_HOME_PATH"

_SET_ENV = (
    "/usr/local/Ascend/ascend-toolkit/set_env.sh",
    "/usr/local/Ascend/cann/set_env.sh",
    "~/Ascend/ascend-toolkit/set_env.sh",
    "~/Ascend/cann/set_env.sh",
)
# Needed to open any device.
_SHARED_NODES = ("davinci_manager", "devmm_svm", "hisi_hdc")
_LENGTH = 300


class NpuDiagnosis(NamedTuple):
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what} ({self.fix})"


def before_import() -> NpuDiagnosis | None:
    """Diagnose a torch_npu that is absent or built for another torch, without importing it."""
    try:
        found = importlib.util.find_spec("torch_npu")
    except ValueError:  # imported, without a spec
        found = None
    if found is None and "torch_npu" not in sys.modules:
        return NpuDiagnosis(
            "torch_npu is not installed", "pip install 'mindspeed-lite[npu]', matching your torch and CANN"
        )
    return pair(torch_npu_version(), torch_version())


def pair(npu: str, torch: str) -> NpuDiagnosis | None:
    if not series(npu) or not series(torch) or series(npu) == series(torch):
        return None
    want, have = (".".join(map(str, series(each))) for each in (torch, npu))
    return NpuDiagnosis(
        f"torch_npu {npu} is not for torch {torch}",
        f"pip install 'torch-npu=={want}.*' (and the CANN it names), or 'torch=={have}.*'",
    )


def of_import(error: BaseException) -> NpuDiagnosis:
    text = _chain(error)
    symbol = re.search(r"(\S*\.so[\w.]*): undefined symbol: (\w+)", text)
    if symbol is not None:
        return _of_symbol(Path(symbol[1]).name, symbol[2])
    library = re.search(r"(lib[\w+-]+\.so[\w.]*): cannot open", text)
    if library is None and "version `" not in text:  # glibc symbol versions differ
        library = re.search(r"(lib(?:hccl|ascend)\w*\.so)", text)
    if library is not None and not re.match(r"lib(torch|c10)", library[1]):
        return _of_library(library[1])
    fix = "reinstall torch_npu for this torch and CANN; if set_env.sh is sourced and they match, report this line"
    return NpuDiagnosis(f"torch_npu is installed but does not import: {text}", fix)


def of_devices() -> NpuDiagnosis:
    visible = os.environ.get(VISIBLE)
    nodes = sorted(DEVICE_NODES.glob("davinci[0-9]*"))
    if not nodes:
        fix = (
            "`npu-smi info` must list one: load the Ascend driver; in a container, pass "
            "--device /dev/davinci0 (and the others), " + ", ".join(f"/dev/{name}" for name in _SHARED_NODES)
        )
        return NpuDiagnosis(f"torch_npu finds no NPU device: there is no {DEVICE_NODES}/davinci*", fix)
    missing = [name for name in _SHARED_NODES if not (DEVICE_NODES / name).exists()]
    if missing:
        there = f"{nodes[0]} is there, {', '.join(str(DEVICE_NODES / name) for name in missing)} not"
        fix = "pass the missing nodes to the container with --device, or reload the Ascend driver"
        return NpuDiagnosis(f"torch_npu finds no NPU device: {there}", fix)
    every = [*nodes, *(DEVICE_NODES / name for name in _SHARED_NODES)]
    closed = next((each for each in every if not os.access(each, os.R_OK | os.W_OK)), None)
    if closed is not None:
        fix = f"add this user to the group that owns it (`usermod -aG {_group(closed)} USER`), then log in again"
        return NpuDiagnosis(f"torch_npu finds no NPU device: no permission to open {closed}", fix)
    if visible is not None:
        fix = f"unset {VISIBLE}, or name devices of 0 to {len(nodes) - 1} (numbers restart at 0 in some containers)"
        return NpuDiagnosis(f"torch_npu finds no NPU device: {VISIBLE}={visible!r} leaves none of {len(nodes)}", fix)
    fix = "`npu-smi info` must show it healthy; install the driver and firmware that this CANN names"
    return NpuDiagnosis(
        f"torch_npu finds no NPU device although {nodes[0]} can be opened: driver and CANN do not fit", fix
    )


def of_opening(error: BaseException) -> NpuDiagnosis:
    fix = f"look at `npu-smi info`: it may be busy, unhealthy or without memory; {VISIBLE} leaves devices out"
    return NpuDiagnosis(f"an NPU is there but cannot be opened: {_chain(error)}", fix)


def series(version: str) -> tuple[int, ...]:
    return tuple(int(each) for each in re.findall(r"\d+", version)[:2])


def torch_npu_version() -> str:
    """Version by its metadata, else of the imported module; empty if unknown."""
    return _metadata_version("torch_npu") or str(getattr(sys.modules.get("torch_npu"), "__version__", ""))


def torch_version() -> str:
    return str(getattr(sys.modules.get("torch"), "__version__", "")) or _metadata_version("torch")


def cann_version() -> str:
    """Version of the CANN whose set_env.sh is sourced; empty if unknown."""
    home = os.environ.get(CANN_HOME)
    if not home:
        return ""
    folder = Path(home)
    for path in (*sorted(folder.glob("*-linux/ascend_*_install.info")), folder / "version.cfg"):
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        match = re.search(r"version=\[?(?:[^\n\]:]*:)?([\w.]+)", text)
        if match is not None:
            return match[1]
    return ""


def _of_symbol(library: str, symbol: str) -> NpuDiagnosis:
    # Mangled names of torch's namespaces: c10, at, torch.
    if re.match(r"_ZNK?(3c10|2at|5torch)", symbol):
        fix = "install the torch_npu that is built for exactly this torch, and a torch from the same place"
        return NpuDiagnosis(f"torch_npu {torch_npu_version()} does not fit torch {torch_version()}: no {symbol}", fix)
    fix = "install the CANN that this torch_npu's release notes name, and source its set_env.sh"
    return NpuDiagnosis(f"torch_npu {torch_npu_version()} does not fit this CANN: {library} lacks {symbol}", fix)


def _of_library(library: str) -> NpuDiagnosis:
    if re.match(r"lib(ascend_hal|drv)", library):
        fix = "install the Ascend driver; in a container, mount /usr/local/Ascend/driver and put its lib64 on "
        return NpuDiagnosis(f"the Ascend driver's {library} is not found", fix + "LD_LIBRARY_PATH")
    if library.startswith("libatb"):
        return NpuDiagnosis(f"CANN's {library} is not found", "install CANN's NNAL package and source its set_env.sh")
    home = os.environ.get(CANN_HOME)
    script = next((each for each in map(os.path.expanduser, _SET_ENV) if os.path.isfile(each)), None)
    folders = ("lib64", "runtime/lib64", "compiler/lib64")
    if home and any((Path(home) / folder / library).exists() for folder in folders):
        fix = f"source CANN's set_env.sh again in this shell: LD_LIBRARY_PATH lacks its folder below {home}"
        return NpuDiagnosis(f"CANN's {library} is there but not found", fix)
    if home:
        fix = "install the whole CANN toolkit that this torch_npu names, and source its set_env.sh"
        return NpuDiagnosis(f"CANN's {library} is not found, nor is it below {CANN_HOME}={home}", fix)
    fix = f"source {script}" if script else "install the CANN that this torch_npu names, and source its set_env.sh"
    return NpuDiagnosis(f"CANN's {library} is not found and {CANN_HOME} is not set: no set_env.sh is sourced", fix)


def _chain(error: BaseException) -> str:
    """Innermost cause in one line; torch wraps it."""
    inner, cause = error, error.__cause__
    while cause is not None:
        inner, cause = cause, cause.__cause__
    if isinstance(inner, SystemExit) and inner.__context__ is not None:
        inner = inner.__context__
    # torch_npu adds lines with an error code, date and process.
    text = next((line for line in str(inner).splitlines() if line.strip()), "")
    return f"{type(inner).__name__}: {' '.join(text.split())}"[:_LENGTH].rstrip(": ")


def _group(path: Path) -> str:
    try:
        return path.group()
    except (KeyError, OSError):
        return "HwHiAiUser"


def _metadata_version(package: str) -> str:
    try:
        return metadata.version(package) or ""
    except metadata.PackageNotFoundError:
        return ""
