"""Compilers, and Megatron's dataset helper, which a checkout builds at every start."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig

from . import found
from .row import Row, note, ok, problem


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
    missing += [] if found.is_there("pybind11") else ["pybind11"]
    missing += [] if compiler else ["a C++ compiler"]
    host = found.host()
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
