"""`mindspeed-lite features NAME --diff`: how the targets here differ from those in the verified release.

The verified release's source is the user's own copy of it: the folder given, or the wheel of that release, which pip
downloads once into the cache.
"""

from __future__ import annotations

import difflib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from . import terminal

if TYPE_CHECKING:
    from mindspeed_lite.engine import Feature
    from mindspeed_lite.engine.fingerprints import Table


def show(program: str, feature: Feature, known: Table, against: str | None) -> int:
    """Print a unified diff for each target, or what one relies on, that differs.

    Returns 0 if none does, 1 if some do, 2 without a comparison.
    """
    from packaging.version import Version

    from mindspeed_lite.engine import FingerprintError
    from mindspeed_lite.engine.fingerprints import fingerprinted
    from mindspeed_lite.engine.source import fingerprint, reader_of, source_text
    from mindspeed_lite.platform import megatron

    version, root = megatron.version(), megatron.root()
    if version is None or root is None:
        return terminal.fail(program, "megatron.core cannot be found: install megatron-core or set PYTHONPATH")
    if against is not None and not (Path(against) / "megatron" / "core").is_dir():
        return terminal.fail(program, f"--against {against}: there is no megatron/core in it")
    installed = reader_of(root)
    differing = 0
    for patch, target in fingerprinted(feature.patches_for(version)[0]):
        title = f"{'relied on' if target in patch.relies_on else patch.kind} {target}"
        verified = known.known(patch, target)
        releases = sorted(verified, key=Version)
        try:
            here = fingerprint(installed, target)
        except (FingerprintError, SyntaxError) as error:
            lacks = known.may_lack(patch, target)
            print(f"{title}: {'not in this release, as in a verified one' if lacks else error}")
            differing += not lacks
            continue
        if against is None and (not releases or here in verified.values()):
            print(f"{title}: " + ("as verified" if releases else "in no verified release"))
            continue
        try:
            other = reader_of(Path(against) if against is not None else _download(releases[-1]))
            there = source_text(other, target).splitlines()
            if here == fingerprint(other, target):
                print(f"{title}: the same")
                continue
        except (OSError, FingerprintError, subprocess.CalledProcessError) as error:
            return terminal.fail(program, f"{target}: no source to compare with ({error}); give --against DIR")
        names = against or f"megatron-core {releases[-1]}", f"here ({version})"
        lines = list(difflib.unified_diff(there, source_text(installed, target).splitlines(), *names, lineterm=""))
        print(f"{title}: {'differs' if lines else 'the same text; what it calls differs'}")
        print("\n".join(lines))
        differing += 1
    return min(differing, 1)


def _download(release: str) -> Path:
    """The folder with that release's `megatron`, from the cache or by pip."""
    from mindspeed_lite.platform import cache

    folder = Path(cache.folder()) / "releases" / release
    if not (folder / "megatron" / "core").is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        print(f"downloading megatron-core {release} with pip, to compare with", file=sys.stderr)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run(
            [*command, "--disable-pip-version-check", "-d", str(folder), f"megatron-core=={release}"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        for wheel in folder.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
            wheel.unlink()
    return folder
