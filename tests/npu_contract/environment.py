"""torch_npu in a folder of its own, stub libraries in place of CANN, and subprocesses that use both.

The main environment stays free of torch_npu: where the wheel is installed, every plain `import torch` would try
to load it. `python -m tests.npu_contract.environment` prepares `.npu` and says what it did.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.npu_contract import stubs

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".npu"

# torch -> the newest torch_npu wheel for it. A post release fits the same torch as the release it follows.
WHEELS = {
    "2.7.1": "2.7.1.post11",
    "2.8.0": "2.8.0.post5",
    "2.9.0": "2.9.0.post9",
    "2.9.1": "2.9.1",
    "2.10.0": "2.10.0.post7",
    "2.11.0": "2.11.0.post3",
    "2.12.0": "2.12.0.post3",
    "2.13.0": "2.13.0",
    "2.14.0": "2.14.0",
}

# What a subprocess finds.
MODES = {
    "fake": "a device that refuses memory: fake tensors, meta kernels, autograd formulas",
    "host": "a device whose memory is the host's and whose kernels compute nothing: the wheel's own C++ checks",
}


class NotPreparedError(RuntimeError):
    """The environment cannot be made here; the message says what is missing."""


@dataclass(frozen=True)
class Environment:
    """A prepared folder."""

    wheel: str
    site: Path
    stubs: Path

    def run(
        self,
        code: str,
        mode: str = "fake",
        *arguments: str,
        devices: int = 1,
        timeout: float = 300,
        **variables: str,
    ) -> subprocess.CompletedProcess[str]:
        """Run a module (`package.module`) or source text in a new process that has loaded torch and torch_npu.

        mode: one of MODES. arguments: its sys.argv[1:]. variables: added to its environment. Output is captured
        as text, and the exit status is the caller's to judge.
        """
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
        return subprocess.run(
            [sys.executable, "-m", "tests.npu_contract.load", code, *arguments],
            cwd=ROOT,
            env={**self.variables(mode, devices), **variables},
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def variables(self, mode: str, devices: int = 1) -> dict[str, str]:
        """The environment of a process in `mode`: this one's, without what would change torch's or our behaviour."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("MINDSPEED_LITE_", "CANN_STUB_", "ASCEND_"))
        }
        path = [str(ROOT), str(self.site), *filter(None, [kept.get("PYTHONPATH")])]
        kept.update(
            PYTHONPATH=os.pathsep.join(path),
            # The wheel asks to be imported by every `import torch`; load.py does it in the right order instead.
            TORCH_DEVICE_BACKEND_AUTOLOAD="0",
            # Operators run in the caller's thread: through the queue a failed one is silent.
            TASK_QUEUE_ENABLE="0",
            # torch_npu refuses to share a process with a visible GPU.
            CUDA_VISIBLE_DEVICES="",
            CANN_STUB_FOLDER=str(self.stubs),
            CANN_STUB_MODE=mode,
            CANN_STUB_DEVICES=str(devices),
        )
        return kept


def prepare(folder: Path = FOLDER) -> Environment:
    """Install the wheel and build the stubs in `folder`, unless they are there and current.

    Raises NotPreparedError with what is missing: a wheel for this torch, a package index, a compiler.
    """
    wheel = wheel_for(torch_version())
    folder.mkdir(parents=True, exist_ok=True)
    site, libraries = folder / "site", folder / "stubs"
    with _locked(folder):
        stamp = f"torch-npu {wheel} python {sys.version_info.major}.{sys.version_info.minor} {platform.machine()}"
        if not _current(site, stamp):
            _install(wheel, site)
            _stamp(site, stamp)
        stamp = f"{stamp} torch {importlib.metadata.version('torch')} {torch_folder()} stubs {_recipe()}"
        if not _current(libraries, stamp):
            _build(site, libraries)
            _stamp(libraries, stamp)
    return Environment(wheel, site, libraries)


def torch_version() -> str:
    """The installed torch, without its local part (+cpu, +cu130)."""
    return importlib.metadata.version("torch").partition("+")[0]


def torch_folder() -> Path:
    """The package folder of the installed torch, found without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise NotPreparedError("torch is not installed; `make install` installs it")
    return Path(spec.origin).parent


def wheel_for(torch: str) -> str:
    """The release of torch_npu for a release of torch."""
    if torch not in WHEELS:
        raise NotPreparedError(
            f"no torch_npu wheel is known for torch {torch} (for {', '.join(WHEELS)} there is one): add it to WHEELS "
            "in tests/npu_contract/environment.py"
        )
    return WHEELS[torch]


def _install(wheel: str, site: Path) -> None:
    fresh = site.with_name("site.new")
    shutil.rmtree(fresh, ignore_errors=True)
    # One more try and no long wait: without an index the tests go on without it.
    command = "-m pip install --quiet --disable-pip-version-check --retries 1 --timeout 20".split()
    command += "--no-deps --only-binary :all: --target".split()
    ran = subprocess.run([sys.executable, *command, str(fresh), f"torch-npu=={wheel}"], capture_output=True, text=True)
    if ran.returncode or not (fresh / "torch_npu").is_dir():
        shutil.rmtree(fresh, ignore_errors=True)
        said = (ran.stderr.strip() or "pip said nothing").splitlines()[-1]
        raise NotPreparedError(
            f"torch-npu=={wheel} could not be installed ({said}). It takes a package index that pip reaches, once "
            "(44 MB), and Linux"
        )
    _replace(fresh, site)


def _build(site: Path, libraries: Path) -> None:
    fresh = libraries.with_name("stubs.new")
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        stubs.build(site, torch_folder(), fresh)
    except stubs.ToolError as error:
        raise NotPreparedError(str(error)) from error
    _replace(fresh, libraries)


def _replace(fresh: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)


def _recipe() -> str:
    """A hash of everything the stubs are made from, besides the wheel and torch."""
    here = Path(__file__).parent
    sources = [here / "stubs.py", *sorted((here / "cann").iterdir())]
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]


def _current(folder: Path, stamp: str) -> bool:
    written = folder / ".stamp"
    return written.is_file() and written.read_text() == stamp


def _stamp(folder: Path, stamp: str) -> None:
    (folder / ".stamp").write_text(stamp)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process prepares, others wait for it."""
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> int:
    start = time.perf_counter()
    try:
        made = prepare()
    except NotPreparedError as error:
        print(f"npu_contract: {error}", file=sys.stderr)
        return 1
    seconds = time.perf_counter() - start
    tag = re.sub(r"\s+", " ", f"torch {torch_version()}, torch_npu {made.wheel}")
    print(f"npu_contract: {tag}, stub CANN libraries in {made.stubs.relative_to(ROOT)} ({seconds:.1f} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
