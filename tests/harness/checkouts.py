"""The Megatron-core releases the tests run on, side by side under one torch.

`python -m tests.harness.checkouts` installs those that are missing into `.releases/<version>` (3 MB each, no
dependencies). The release that the environment itself has installed needs no folder.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".releases"
# What every change is tested on.
ALL = ("0.16.1", "0.17.1", "0.18.2", "0.19.2")
# Megatron's main branch, of which no registry has a package: `make test-whole MAIN=DIR` names a checkout.
MAIN = "main"
TO_MAIN = (*ALL, MAIN)
# What `make matrix` and a rotating part of `make test` train on besides.
OLDER = ("0.12.1", "0.13.1", "0.14.0", "0.15.3")
EVERY = (*OLDER, *ALL)
TODAY = OLDER[datetime.date.today().toordinal() % len(OLDER)]
PIP_INSTALL = [sys.executable, *"-m pip install --quiet --no-deps --disable-pip-version-check".split()]
# The wheels before 0.17 do not hold megatron.training.
WITH_TRAINING = ALL[1:]


def installed() -> str:
    """The release of this environment; "" if it has none."""
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return ""


def version(release: str) -> str:
    """What a release says that it is; for `MAIN` without a checkout, the newest release."""
    if release != MAIN:
        return release
    try:
        text = (_main() / "core" / "package_info.py").read_text()
    except ValueError:
        return ALL[-1]
    return ".".join(re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", text, re.M))


def _main() -> Path:
    found = Path(os.environ.get("MEGATRON_MAIN") or "?", "megatron")
    if not (found / "core").is_dir():
        raise ValueError("no checkout of Megatron-LM's main branch is named: make test-whole MAIN=DIR")
    return found.resolve()


def folder(release: str) -> Path | None:
    """Where `release` lies; None if the environment's own is the one.

    Raises:
        ValueError: it is `MAIN`, and no checkout is named.
    """
    if release == MAIN:
        return _main().parent
    return None if release == installed() else FOLDER / release


def fetched(release: str) -> Path | None:
    """Where `release` lies, installed there if it is missing; None if the environment's own is the one.

    Raises:
        ValueError: pip cannot install it.
    """
    target = folder(release)
    if target is not None and not (target / "megatron").is_dir():
        print(f"installing megatron-core {release} into {target.relative_to(ROOT)}", flush=True)
        command = [*PIP_INSTALL, "--target", str(target), f"megatron-core=={release}"]
        if subprocess.run(command).returncode:
            raise ValueError(f"megatron-core {release} cannot be installed: see the lines of pip above")
    return target


def holds(root: Path | None, target: str) -> bool:
    """Whether `root` holds a target's package; wheels lack `megatron.rl`, which its repository has."""
    return root is not None and root.joinpath(*target.partition(":")[0].split(".")[:2]).is_dir()


def prepare() -> None:
    """Install what is missing."""
    for release in EVERY:
        fetched(release)


if __name__ == "__main__":
    prepare()
