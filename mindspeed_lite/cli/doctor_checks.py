"""Checks of doctor, in `CHECKS`.

A check yields (status, text, fix): "note" allows training, "problem" does not. Checks import no Megatron and tolerate
missing packages.
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mindspeed_lite import error_exit, platform
from mindspeed_lite.platform import allocator, binding, npu_trouble
from mindspeed_lite.platform.npu_trouble import series

from . import npu_probe
from .features import compared
from .script_imports import missing_packages

_TORCH = (2, 6)
# The documented ones; modules that define others import torch.
VARIABLES = tuple(
    f"MINDSPEED_LITE_{name}" for name in "ALLOCATOR BIND CACHE CPU_MATMUL DEVICE DISABLE SWAP TRACEBACK".split()
)
_COLLECTIVES = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
OWN_PACKAGES = ("numpy", "wrapt", "packaging", "rich")
_DISTRIBUTIONS = {"yaml": "pyyaml", "PIL": "pillow"}

Findings = Iterator[tuple[str, ...]]


class Row(NamedTuple):
    """A finding: "ok", "note" or "problem"; `fix`: how to get what is missing."""

    check: str
    status: str
    text: str
    fix: str = ""


class Megatron(NamedTuple):
    version: str
    core: Path
    training: Path | None


class Machine:
    """Facts of the machine that checks read, each determined once.

    script: the training script, whose folder is in `sys.path`.
    """

    def __init__(self, npu_seconds: float = npu_probe.SECONDS, script: str = "") -> None:
        self._npu_seconds = npu_seconds
        self.script = Path(script) if script else None

    @functools.cached_property
    def torch(self) -> Any:
        """The module, or the error of its import."""
        try:
            with npu_probe.without_autoload():
                return importlib.import_module("torch")
        except Exception as error:
            return error

    @property
    def has_torch(self) -> bool:
        return not isinstance(self.torch, Exception)

    @functools.cached_property
    def npu(self) -> npu_probe.Probe:
        return npu_probe.ask(self._npu_seconds)

    @functools.cached_property
    def devices(self) -> dict[str, list[str]]:
        """Device -> reasons why it cannot be used."""
        found = {"npu": [] if self.npu.trouble is None else [str(self.npu.trouble)]}
        for name in platform.device_names():
            try:
                found.setdefault(name, [] if name == "npu" else platform.device(name).available())
            except Exception as error:
                found[name] = [f"its check failed: {one_line(error)}"]
        return found

    @property
    def listed_devices(self) -> str:
        return "; ".join(f"{name}: {', '.join(reasons) or 'usable'}" for name, reasons in self.devices.items())

    @functools.cached_property
    def chosen(self) -> tuple[str, str]:
        """The device of a training, or "" and why there is none."""
        asked = os.environ.get(platform.DEVICE_VARIABLE) or "auto"
        usable = [name for name, reasons in self.devices.items() if asked in ("auto", name) and not reasons]
        if usable:
            return usable[0], ""
        why = "asks for a device that cannot be used" if asked in ("auto", *self.devices) else "is not a device"
        return "", f"{platform.DEVICE_VARIABLE}={asked} {why}. {self.listed_devices}"

    @property
    def device(self) -> str:
        return (self.chosen[0] if self.has_torch else "") or "cpu"

    @functools.cached_property
    def megatron(self) -> Megatron | None:
        spec = importlib.util.find_spec("megatron")
        folders = [Path(each) for each in (spec.submodule_search_locations or ())] if spec is not None else []
        core, training = (
            next((each / name for each in folders if (each / name / "__init__.py").is_file()), None)
            for name in ("core", "training")
        )
        if core is None or not (core / "package_info.py").is_file():
            return None
        version = str(runpy.run_path(str(core / "package_info.py"))["__version__"])
        return Megatron(version.partition("+")[0], core, training)


def examine(machine: Machine, tell: Callable[[int, int, str], None] = lambda done, total, what: None) -> list[Row]:
    rows: list[Row] = []
    for number, (name, check) in enumerate(CHECKS.items()):
        tell(number, len(CHECKS), name)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                rows += [Row(name, *finding) for finding in check(machine)]
        except Exception as error:
            missing = error.name if isinstance(error, ModuleNotFoundError) and error.name in OWN_PACKAGES else None
            if missing or not machine.has_torch:
                see = "see own packages" if missing else "see torch"
                rows.append(Row(name, "note", f"cannot be told without {missing or 'torch'}", see))
            else:
                rows.append(Row(name, "problem", f"cannot be examined: {one_line(error)}", "report this with the text"))
    return rows


_IN_ITS_PYTHON = """
import json, sys
seconds, script, is_run = json.loads(sys.argv[1])
path = [each for each in sys.path if each]
sys.path = sys.path if is_run else path
from mindspeed_lite.cli.doctor_checks import Machine, examine
sys.path = path
print(json.dumps(examine(Machine(seconds, script))))
"""


def examine_command(command: Sequence[str], npu_seconds: float) -> list[Row]:
    """Findings about the Python, path, folder and script that a training command starts. Raises LaunchError."""
    from mindspeed_lite.dryrun import launch

    found = launch.find(command)
    script = "" if found.words[0] == "-m" else os.path.realpath(os.path.join(found.folder, found.words[0]))
    path = [os.path.dirname(script) or found.folder, *filter(None, [found.environment.get("PYTHONPATH")])]
    given = json.dumps([npu_seconds, script, found.is_run])
    ran = subprocess.run(
        [found.interpreter, "-c", _IN_ITS_PYTHON, given], cwd=found.folder, capture_output=True, text=True,
        env={**found.environment, "PYTHONPATH": os.pathsep.join(path)},
    )  # fmt: skip
    ranks = f"{found.world_size} rank{'s' * (found.world_size > 1)}"
    rows = [Row("command", "ok", f"{found.interpreter} runs {script or found.words[1]} in {found.folder}, {ranks}")]
    if script and not found.is_run and "mindspeed_lite" not in Path(script).read_text("utf-8", "replace"):
        text = f"{os.path.basename(script)} does not import mindspeed_lite"
        fix = "put `import mindspeed_lite.megatron_adaptor` at its top, or start it by `-m mindspeed_lite run`"
        rows.append(Row("command", "note", text, fix))
    if ran.returncode == 0:
        return rows + [Row(*row) for row in json.loads(ran.stdout.splitlines()[-1])]
    last = (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1]
    fix = f"install mindspeed-lite for it: {found.interpreter} -m pip install ..., or put it on PYTHONPATH"
    return [*rows, Row("command", "problem", f"this Python cannot be examined: {last}", fix)]


def one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # broken parent, or a stub without a spec
        return False


def _python(machine: Machine) -> Findings:
    yield "ok", f"{python_platform.python_version()} at {sys.executable}"


def _torch(machine: Machine) -> Findings:
    torch, install = machine.torch, f"pip install 'torch>={'.'.join(map(str, _TORCH))}'"
    if not is_there("torch"):
        yield "problem", "not installed", install
        return
    if not machine.has_torch:
        fix = "if an extension named there is not for this torch: install the matching one, or leave it out by "
        yield "problem", f"does not import: {one_line(torch)}", f"{fix}{npu_probe.AUTOLOAD}=0; else reinstall torch"
        return
    built = torch.version.cuda or torch.version.hip
    text = f"{torch.__version__}, built {f'for CUDA or ROCm {built}' if built else 'without CUDA'}"
    trouble = machine.npu.trouble if machine.npu.breaks_torch else None
    if series(str(torch.__version__)) < _TORCH:
        yield "problem", f"{text}: too old", install
    elif trouble is not None:
        text = f"{text}: `import torch` fails, for it loads torch_npu: {trouble.what}"
        yield "problem", text, f"{trouble.fix}; to train without NPUs set {npu_probe.AUTOLOAD}=0"
    else:
        yield "ok", text


def _own_packages(machine: Machine) -> Findings:
    missing = [name for name in OWN_PACKAGES if not is_there(name)]
    if missing:
        yield "problem", f"{', '.join(missing)} not installed", f"pip install {' '.join(missing)}"
    else:
        yield "ok", ", ".join(OWN_PACKAGES)


def _script_packages(machine: Machine) -> Findings:
    if machine.script is None and (machine.megatron is None or machine.megatron.training is None):
        return
    missing = missing_packages(machine.script)
    names = [_DISTRIBUTIONS.get(name, name) for name in missing]
    where = machine.script.name if machine.script is not None else "megatron.training"
    if missing:
        places = ", ".join(f"{name} (by {file})" for name, file in missing.items())
        yield "problem", f"{where} imports what is not installed: {places}", f"pip install {' '.join(names)}"
    else:
        yield "ok", f"everything that {where} imports at its start is there"


def _megatron(machine: Machine) -> Findings:
    if machine.megatron is None:
        fix = "pip install megatron-core, or put a Megatron-LM checkout first on PYTHONPATH; a checkout's own script "
        yield "problem", "not found", f"{fix}finds it without"
        return
    version, core, _ = machine.megatron
    patches = importlib.import_module("mindspeed_lite.patches")
    known = json.loads((Path(patches.__path__[0]) / "fingerprints.json").read_text(encoding="utf-8"))
    releases = sorted(known, key=lambda each: tuple(int(part) for part in re.findall(r"\d+", each)))
    lowest = ".".join(map(str, series(releases[0])))
    text = f"{version} at {core}; verified releases: {', '.join(releases)}"
    if machine.script is None:
        text += "; a script in a Megatron-LM checkout runs its own: `mindspeed-lite doctor -- COMMAND` judges that one"
    if series(version) < series(lowest):
        yield "problem", f"{text}: older than supported", f"pip install 'megatron-core>={lowest}', or check it out"
    elif version in releases:
        yield "ok", text
    elif series(version) in map(series, releases):
        yield "ok", f"{text}: in a verified series, each target is compared"
    else:
        yield "note", f"{text}: not verified; a feature whose target has changed is skipped"


def _training(machine: Machine) -> Findings:
    if machine.megatron is None:
        return
    version, core, training = machine.megatron
    if training is None:
        text = f"not in the folder of megatron.core {version}: the training loop and its flags are missing (0.16 wheels"
        fix = "run a script of a Megatron-LM checkout: its folder has both"
        yield "note", f"{text} lack them); mindspeed_lite.enable(...) works without", fix
    elif training.parent != core.parent:
        text = f"at {training}, megatron.core {version} at {core}: two are mixed"
        yield "problem", text, "take one of them off PYTHONPATH or uninstall it"
    else:
        yield "ok", "there"


def _device(machine: Machine) -> Findings:
    if not machine.has_torch:
        raise machine.torch
    chosen, why_none = machine.chosen
    if not chosen:
        yield "problem", why_none, f"unset {platform.DEVICE_VARIABLE}, or set it to one that is usable"
        return
    is_asked = os.environ.get(platform.DEVICE_VARIABLE, "auto") not in ("", "auto")
    by = f"by {platform.DEVICE_VARIABLE}" if is_asked else "chosen by availability"
    facts = machine.npu.facts
    hardware = f"{facts['count']} x {facts['name']}" if chosen == "npu" else platform.device(chosen).describe()
    yield "ok", f"{chosen} ({hardware}), {by}. {machine.listed_devices}"


def _torch_npu(machine: Machine) -> Findings:
    facts, trouble = machine.npu.facts, machine.npu.trouble
    version, torch = facts.get("version") or npu_trouble.torch_npu_version(), npu_trouble.torch_version()
    if not version and not is_there("torch_npu"):
        return
    if not torch:
        yield "note", f"{version}, without torch", f"install torch {version} first"
        return
    cann = f", CANN {facts['cann']}" if facts.get("cann") else ""
    text = f"{version or 'unknown version'} for torch {torch}{cann}"
    if trouble is not None:
        # A missing NPU is a problem of the device check, if it is required.
        yield "note", f"{text}: {trouble.what}", trouble.fix
    elif facts["transfer"]:
        fix = "install the torch_npu release that matches your torch"
        yield "problem", f"{text}: transfer_to_npu does not import: {facts['transfer']}", fix
    else:
        hccl = "there" if facts["hccl"] else "absent"
        yield "ok", f"{text}, {facts['count']} x {facts['name']}, transfer_to_npu imports, HCCL {hccl}"


def _megatron_arguments(machine: Machine) -> Findings:
    from mindspeed_lite.patches._shared import megatron_arguments

    error = megatron_arguments.import_error()
    # An ImportError of the package itself, which Megatron expects, leaves no module.
    if error is not None and (not isinstance(error, ImportError) or "transformer_engine" in sys.modules):
        text = f"Megatron imports transformer_engine and stops there: {one_line(error)}"
        yield "problem", text, "install its extension, or pip uninstall transformer_engine"
    missing = {each.flag: each.needs for each in megatron_arguments.DEFAULTS if each.is_missing(machine.device)}
    if missing:
        flags = ", ".join(f"{flag} (for {needs})" for flag, needs in missing.items())
        yield "note", f"flags will be set in place of Megatron's defaults, which need what is missing: {flags}"
    else:
        yield "ok", "everything that Megatron's defaults ask for is there"


def compiler() -> str | None:
    named = os.environ.get("CXX")
    return shutil.which(named) if named else shutil.which("g++") or shutil.which("clang++")


def _compiler(machine: Machine) -> Findings:
    if found := compiler():
        yield "ok", found
    else:
        text = "none: torch.compile cannot serve the CPU, nor a Megatron checkout build its dataset helper"
        yield "note", text, "install g++ or clang++ (apt install g++), or name one in CXX"


def _dataset_helper(machine: Machine) -> Findings:
    folder = machine.megatron and machine.megatron.core / "datasets"
    if folder is not None and not (folder / "Makefile").is_file():
        text = "compiled in this wheel of megatron-core, without the makefile that megatron.training calls at every "
        yield "ok", f"{text}start: the device layer skips that on cpu and npu; on cuda a script has to"
        return
    present = {"make": shutil.which("make"), "pybind11": is_there("pybind11"), "a C++ compiler": compiler()}
    missing = [name for name, there in present.items() if not there]
    suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
    is_built = folder is not None and (folder / f"helpers_cpp{suffix}").is_file()
    if missing:
        # make is always called, even with the helper built.
        is_blocked = folder is not None and (not is_built or "make" in missing)
        text = f"{', '.join(missing)} missing: a Megatron checkout makes its dataset helper at every start"
        yield "problem" if is_blocked else "note", text, "apt install make g++, pip install pybind11"
    elif folder is None or is_built:
        yield "ok", "built" if is_built else "make, pybind11 and a compiler are there"
    elif (made := suffix_of_python3_config()) != suffix:
        text = f"python3-config says {made!r}, this Python loads {suffix!r}: make would build a name that is not found"
        fix = f"put this Python's python3-config first on PATH, or once: make -C {folder} LIBEXT={suffix}"
        yield "problem", text, fix
    else:
        yield "ok", "make builds it at the first start"


def suffix_of_python3_config() -> str:
    # As in `run`: the folder of this Python first.
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    program = shutil.which("python3-config", path=path)
    if program is None:
        return ""
    return subprocess.run([program, "--extension-suffix"], capture_output=True, text=True, timeout=30).stdout.strip()


def _collectives(machine: Machine) -> Findings:
    distributed, needed = machine.torch.distributed, _COLLECTIVES[machine.device]
    if not distributed.is_available():
        yield "problem", "torch is built without torch.distributed", "install torch from PyPI"
        return
    there = {
        "gloo": distributed.is_gloo_available(),
        "nccl": distributed.is_nccl_available(),
        "hccl": not machine.devices["npu"] and machine.npu.facts.get("hccl"),
    }
    text = ", ".join(f"{name} {'there' if each else 'absent'}" for name, each in there.items())
    if there[needed]:
        yield "ok", f"{text}; {needed} serves the {machine.device} device"
    else:
        fix = f"install a torch (for hccl: torch_npu) built with {needed}"
        yield "problem", f"{text}; the {machine.device} device needs {needed}", fix


def _allocator(machine: Machine) -> Findings:
    try:
        choice = allocator.wanted()
    except platform.DeviceError as error:
        yield "problem", str(error), f"unset it, or set it to {allocator.KEEP} or {allocator.SYSTEM}"
        return
    if choice == allocator.SYSTEM:
        yield "ok", f"system, by {allocator.ALLOCATOR_VARIABLE}: freed memory goes back at once"
    elif machine.device != "cpu":
        yield "ok", f"not touched: the device is {machine.device}"
    elif reasons := allocator.why_not():
        yield "note", f"`mindspeed-lite run` cannot keep freed memory: {'; '.join(reasons)}"
    else:
        yield "ok", "keep: `mindspeed-lite run` keeps freed memory for the next tensor"


def _binding(machine: Machine) -> Findings:
    try:
        choice = binding.wanted()
        platform.check_launcher()
    except platform.DeviceError as error:
        yield "problem", str(error), f"unset it, or set it to {binding.AUTO} or {binding.NONE}"
        return
    if reason := binding.why_not():
        yield "ok", f"none of ours: {reason}"
        return
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or len(binding.near_devices(machine.device)) or 1)
    done = "binds" if choice == binding.AUTO else f"off; {binding.BIND_VARIABLE}=auto would bind"
    yield "ok", f"{done} {binding.current(machine.device, ranks).to_text()}"


def _environment(machine: Machine) -> Findings:
    found = {name: value for name, value in sorted(os.environ.items()) if name.startswith("MINDSPEED_LITE_")}
    for name, value in found.items():
        if name in VARIABLES:
            is_off = name == "MINDSPEED_LITE_DISABLE" and error_exit.is_set(name)
            yield "note" if is_off else "ok", f"{name}={value}{': off' if is_off else ''}"
        else:
            close = difflib.get_close_matches(name, VARIABLES, n=1)
            fix = f"did you mean {close[0]}?" if close else f"there are {', '.join(VARIABLES)}"
            yield "note", f"{name}={value} is not a variable of mindspeed_lite", fix
    if not found:
        yield "ok", "no MINDSPEED_LITE_ variable is set"


def _features(machine: Machine) -> Findings:
    from mindspeed_lite import runtime
    from mindspeed_lite.engine import Context, Settings
    from mindspeed_lite.ops import dispatch
    from mindspeed_lite.ops.discovery import OPERATORS

    device, megatron, catalogue = machine.device, machine.megatron, runtime.catalogue()
    versions = {"megatron-core": megatron.version if megatron is not None else "not found"}
    context = Context(Settings.of((*runtime.GENERAL, *catalogue.options()), {}), device, versions)
    refused = {}
    for feature in catalogue:
        reasons = list(feature.condition(context)) if feature.condition is not None else []
        if megatron is not None:
            reasons += feature.patches_for(megatron.version)[1]
            targets = compared(feature, megatron.version, megatron.core.parent.parent)
            reasons += [f"{target} {objection}" for target, (_, objection) in targets.items() if objection]
        if reasons:
            refused[feature.name] = reasons
    text = (
        f"{len(catalogue) - len(refused)} of {len(catalogue)} would apply on {device}, as far as known without a model"
    )
    others = [name for name in OPERATORS if dispatch.selected(name, device).backend != device]
    yield "ok", f"{text}; operators by {device}{', but not ' if others else ''}{', '.join(others)}"
    for name, reasons in refused.items():
        yield "note", f"{name} would not apply: {'; '.join(reasons)}"


CHECKS: dict[str, Callable[[Machine], Findings]] = {
    "python": _python,
    "torch": _torch,
    "own packages": _own_packages,
    "megatron-core": _megatron,
    "megatron.training": _training,
    "device": _device,
    "torch_npu": _torch_npu,
    "megatron default": _megatron_arguments,
    "c++ compiler": _compiler,
    "dataset helper": _dataset_helper,
    "collectives": _collectives,
    "script's packages": _script_packages,
    "allocator": _allocator,
    "cpu binding": _binding,
    "environment": _environment,
    "features": _features,
}
