"""Wheels for a GPU machine without a network.

    python -m benchmarks.gpu.wheels DIR     downloads them

The campaign unpacks them with `--wheels DIR`; nothing is installed.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

WHEELS = (
    "megatron-core==0.19.2", "liger-kernel==0.8.5", "pydantic==2.14.4", "pydantic-core==2.50.5",
    "annotated-types==0.8.0", "typing-inspection==0.4.5",
)  # fmt: skip
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")


class WheelError(ValueError):
    """The wheels cannot serve; the text says which, and what to do."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Download and check; exits with 2 where pip fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.wheels", description=main.__doc__)
    parser.add_argument("folder", metavar="DIR", type=Path)
    folder: Path = parser.parse_args(arguments).folder
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--python-version", "3.12", "--implementation", "cp", "--dest", str(folder)]
    command += [f"--platform={each}" for each in _PLATFORMS]
    if subprocess.run([*command, *WHEELS]).returncode:
        parser.error("pip could not download them; its message is above")
    found = [_wheel(folder, wanted) for wanted in WHEELS]
    print(f"{folder}: {len(found)} wheels, {sum(wheel.stat().st_size for wheel in found) / 2**20:.1f} MiB")


def _wheel(folder: Path, wanted: str) -> Path:
    name, version = wanted.split("==")
    files = [*folder.glob(f"{name.replace('-', '_')}-{version}-*.whl")]
    if len(files) != 1:
        raise WheelError(f"{len(files)} wheels of {wanted} in {folder}: fetch them by benchmarks.gpu.wheels {folder}")
    return files[0]


def unpack(folder: Path, target: Path) -> list[Path]:
    """Unpack the wheels once; returns the folders to import from. Raises WheelError."""
    found = []
    for wheel in [_wheel(folder, wanted) for wanted in WHEELS]:
        place = target / f"{wheel.stem}-{wheel.stat().st_size}"
        if not place.is_dir():
            part = place.with_name(f"{place.name}.part")
            shutil.rmtree(part, ignore_errors=True)
            try:
                shutil.unpack_archive(wheel, part, "zip")
            except (OSError, shutil.ReadError) as error:
                raise WheelError(f"cannot read {wheel.name}: {error}; fetch it again") from error
            part.replace(place)
        found += [place, *sorted(place.glob("*.data/*lib"))]
    return found


if __name__ == "__main__":
    main()
