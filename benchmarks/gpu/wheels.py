"""Wheels for a GPU machine without a network.

    python -m benchmarks.gpu.wheels DIR     downloads and checks them

The campaign unpacks them with `--wheels DIR`; nothing is installed.
"""

from __future__ import annotations

import argparse
import email.parser
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# What such a machine is expected to have; every requirement of a wheel must be here or among the wheels.
EXPECTED = (
    "torch", "triton", "numpy", "packaging", "typing-extensions", "rich", "wrapt", "matplotlib", "jinja2", "einops",
    "psutil", "pybind11", "pyyaml", "regex", "six", "pytest", "pytest-xdist", "hypothesis",
)  # fmt: skip
WHEELS = (
    "megatron-core==0.19.2", "liger-kernel==0.8.5", "pydantic==2.14.4", "pydantic-core==2.50.5",
    "annotated-types==0.8.0", "typing-inspection==0.4.5",
)  # fmt: skip
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
# Beside the checkout, they must fit into 64 MiB.
MOST_BYTES = 48 << 20
# A module -> what is left out without it.
NEEDED = {
    "megatron.training": "trainings",
    "pydantic": "trainings",
    "wrapt": "trainings",
    "liger_kernel": "its column, and the training with its patch",
    "hypothesis": "CUDA tests",
    "pytest": "CUDA tests",
    "xdist": "CUDA tests",
}


class WheelError(Exception):
    """The wheels cannot serve; the text says which, and what to do."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Download and check; 2 where something is missing."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.wheels", description=main.__doc__)
    parser.add_argument("folder", metavar="DIR")
    folder = Path(parser.parse_args(arguments).folder)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--python-version", "3.12", "--implementation", "cp", "--dest", str(folder)]
    for platform in _PLATFORMS:
        command += ["--platform", platform]
    ran = subprocess.run([*command, *WHEELS])
    try:
        if ran.returncode:
            raise WheelError("pip could not download them; its message is above")
        found = check(folder)
    except WheelError as error:
        print(f"benchmarks.gpu.wheels: error: {error}", file=sys.stderr)
        return 2
    size = sum(wheel.stat().st_size for wheel in found)
    print(f"{folder}: {len(found)} wheels, {size / 2**20:.1f} MiB, every requirement met")
    return 0


def check(folder: Path) -> list[Path]:
    """The wheels of the folder.

    Raises:
        WheelError: one is missing, broken, twice there, too large, or requires what is neither here nor expected.
    """
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise WheelError(f"no *.whl in {folder}; `python -m benchmarks.gpu.wheels {folder}` fetches them")
    metadata = [_metadata(wheel) for wheel in wheels]
    names = [canonicalize_name(str(each["Name"])) for each in metadata]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise WheelError(f"{folder} has several wheels of {', '.join(sorted(twice))}; keep one of each")
    versions = dict(zip(names, (str(each["Version"]) for each in metadata), strict=True))
    for text in WHEELS:
        wanted = Requirement(text)
        have = versions.get(canonicalize_name(wanted.name))
        if have is None or not wanted.specifier.contains(have):
            raise WheelError(f"{folder} has {wanted.name} {have or 'not at all'}, and {text} is wanted")
    for name, each in zip(names, metadata, strict=True):
        for required in map(Requirement, each.get_all("Requires-Dist") or ()):
            if required.marker is not None and not required.marker.evaluate({"extra": ""}):
                continue
            needed = canonicalize_name(required.name)
            if needed not in EXPECTED and needed not in versions:
                raise WheelError(f"{name} requires {required}, which is neither in {folder} nor expected there")
            if needed in versions and not required.specifier.contains(versions[needed]):
                raise WheelError(f"{name} requires {required}, and {folder} has {versions[needed]}")
    if sum(wheel.stat().st_size for wheel in wheels) > MOST_BYTES:
        raise WheelError(f"the wheels in {folder} have more than {MOST_BYTES >> 20} MiB")
    return wheels


def _metadata(wheel: Path) -> email.message.Message:
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next(each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
            return email.parser.Parser().parsestr(archive.read(name).decode("utf-8"))
    except (OSError, zipfile.BadZipFile, StopIteration) as error:
        raise WheelError(f"cannot read {wheel.name}: {error or 'it has no METADATA'}") from error


def unpack(folder: Path, target: Path) -> list[Path]:
    """Unpack the checked wheels once; returns the folders to import from, and puts them on this process's path.

    Raises:
        WheelError: as `check`.
    """
    found = []
    for wheel in check(folder):
        place = target / f"{wheel.stem}-{wheel.stat().st_size}"
        if not place.is_dir():
            part = place.with_name(f"{place.name}.part")
            shutil.rmtree(part, ignore_errors=True)
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(part)
            part.replace(place)
        found += [place, *sorted(place.glob("*.data/*lib"))]
    sys.path[:0] = [str(path) for path in found if str(path) not in sys.path]
    importlib.invalidate_caches()
    return found


def missing_packages() -> Mapping[str, str]:
    """Modules that cannot be found -> what is left out without them."""

    def is_there(name: str) -> bool:
        try:
            return importlib.util.find_spec(name) is not None
        except ImportError:
            return False

    return {name: what for name, what in NEEDED.items() if not is_there(name)}


if __name__ == "__main__":
    sys.exit(main())
