"""The Megatron an import would find, and which of its defaults would be switched."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

from . import found
from .row import Row, note, ok, problem, said


def check_megatron() -> list[Row]:
    host = found.host()
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


def _version_row(host: found.Host) -> Row:
    where = f"{host.version} at {host.core}"
    try:
        releases = _verified_releases()
    except Exception as error:
        return note("megatron-core", f"{where}; which releases are verified cannot be read: {said(error)}")
    verified = f"verified releases: {', '.join(releases)}"
    lowest, highest = (".".join(map(str, found.series(each))) for each in (releases[0], releases[-1]))
    if found.series(host.version) < found.series(releases[0]):
        fix = f"pip install 'megatron-core>={lowest}', or check out such a release"
        return problem("megatron-core", f"{where}: older than the supported {lowest} to {highest}", fix)
    if host.version in releases:
        return ok("megatron-core", f"{where}; {verified}")
    if any(found.series(each) == found.series(host.version) for each in releases):
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


def check_defaults() -> list[Row]:
    """Which of Megatron's defaults a run would switch, and for want of what."""
    from mindspeed_lite.patches._shared import megatron_defaults

    device = found.device_name()
    rows = []
    for default in megatron_defaults.DEFAULTS:
        missing = default.missing(device)
        if missing is not None:
            rows.append(note("megatron default", f"{default.flag} will be set: the default needs {missing}"))
    return rows or [ok("megatron default", "everything that Megatron's defaults ask for is there")]
