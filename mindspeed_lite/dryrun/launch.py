"""Finds what a launch command starts, by running it with Pythons that only write down what they were to start."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_lite.child_process import child_process

_MODULES = ("torch.distributed.run", "torch.distributed.launch", "torch.distributed.torchrun")
_TIMEOUT, _BACKGROUND = 60.0, 10.0
# Options of torchrun that set the world's size, those without a value, and the others; importing its parser takes
# seconds.
_SIZES = ("nproc-per-node", "nnodes")
_SWITCHES = ("m", "module", "standalone", "no-python", "run-path", "virtual-local-rank")
_OPTIONS = (
    *_SIZES, *_SWITCHES,
    *"duplicate-stderr-filters duplicate-stdout-filters event-log-handler local-addr local-ranks-filter".split(),
    *"log-dir logs-specs master-addr master-port max-restarts monitor-interval node-rank numa-binding r".split(),
    *"rdzv-backend rdzv-conf rdzv-endpoint rdzv-id redirects role signals-to-handle start-method t tee".split(),
    "use-env",
)  # fmt: skip
# How flags of one file or folder end, which a dry run does not need; and those of several.
_PATHS = ("-path", "-dir", "-model", "-file", "--save", "--load")
_LISTS = ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path")
# Every Python that the command starts imports it first; programs that start no training go on.
_SITE = """
import json, os, sys
words = sys.orig_argv[1:]
while words and words[0].startswith("-") and words[0] not in ("-m", "-c"):
    words = words[2:] if words[0] in ("-W", "-X") else words[1:]
name = os.path.basename(words[0]) if words else ""
is_ours = name == "mindspeed-lite" or words[:2] == ["-m", "mindspeed_lite"]
if name == "torchrun" or name.endswith(".py") or words[:1] == ["-m"] and words[1] in {modules!r} or (
    is_ours and "run" in words[1:3]
):
    with open({record!r}, "a") as file:
        found = {{"python": sys.executable, "arguments": words, "folder": os.getcwd(), "environment": dict(os.environ)}}
        file.write(json.dumps(found) + "\\n")
    os._exit(0)
"""


class LaunchError(Exception):
    """No training was found in the command; one line."""


@dataclass(frozen=True)
class TrainingLaunch:
    """A script as a launcher would start it.

    words: script and its arguments, or `-m`, module and its. is_run: through `mindspeed-lite run`.
    unquoted: flags whose path has spaces, of which `words` have the first word.
    """

    interpreter: str
    is_run: bool
    words: tuple[str, ...]
    folder: str
    environment: dict[str, str]
    world_size: int
    local_size: int
    unquoted: tuple[str, ...] = ()


def find(command: Sequence[str]) -> TrainingLaunch:
    """The training that `command` launches: torchrun, python, or a shell script that calls them. Raises LaunchError."""
    with tempfile.TemporaryDirectory(prefix="mindspeed-lite-dryrun-") as folder:
        record = Path(folder, "record")
        site = _SITE.format(record=str(record), modules=_MODULES)
        Path(folder, "sitecustomize.py").write_text(site)
        path = os.pathsep.join([os.environ.get("PATH", os.defpath), os.path.dirname(sys.executable)])
        _write_launchers(Path(folder), path)
        environment = {
            **os.environ,
            "PATH": os.pathsep.join([folder, path]),
            "PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]),
        }
        try:
            with child_process(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            ) as child:
                printed = child.communicate(timeout=_TIMEOUT)[0].decode(errors="replace")
                # A script may start the training in the background and end.
                until = time.monotonic() + _BACKGROUND
                while not record.exists() and _is_alive(child.pid) and time.monotonic() < until:
                    time.sleep(0.05)
        except OSError as error:
            hint = ": leave out the quotes around the whole command" if " " in command[0] else ""
            raise LaunchError(f"{command[0]} does not run: {error.strerror}{hint}") from None
        except subprocess.TimeoutExpired:
            raise LaunchError(f"{command[0]} has started no training after {_TIMEOUT:.0f} seconds") from None
        if not record.exists():
            last = printed.strip().splitlines()[-1:] or [f"it printed nothing and ended with {child.returncode}"]
            raise LaunchError(f"{shlex.join(command)[:80]} starts no torchrun and no python script: {last[0]}")
        found = json.loads(record.read_text().splitlines()[-1])
        for name in ("PATH", "PYTHONPATH"):
            given = found["environment"][name].split(os.pathsep)
            found["environment"][name] = os.pathsep.join(each for each in given if each and each != folder)
    return _read(found["python"], found["arguments"], found["folder"], found["environment"])


def _is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _write_launchers(folder: Path, path: str) -> None:
    """Programs that come first in PATH: a script may set a PYTHONPATH of its own, without `folder`."""
    for name in ("python", "python3", "torchrun", os.path.basename(sys.executable)):
        if program := shutil.which(name, path=path):
            launcher = folder / name
            text = f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(folder))}:"$PYTHONPATH" exec {shlex.quote(program)} "$@"\n'
            launcher.write_text(text)
            launcher.chmod(0o755)


def _read(interpreter: str, words: list[str], folder: str, environment: dict[str, str]) -> TrainingLaunch:
    per_node, nodes = environment.get("WORLD_SIZE", "1"), "1"
    launcher = 2 if words[0] == "-m" and words[1] in _MODULES else int(os.path.basename(words[0]) == "torchrun")
    if launcher:
        options, left = _torchrun(words[launcher:])
        given = {name: options.get(name, environment.get(f"PET_{name.replace('-', '_').upper()}")) for name in _SIZES}
        per_node, nodes = given["nproc-per-node"] or "1", (given["nnodes"] or "1").rpartition(":")[2]
        if empty := next((name for name in _SIZES if given[name] == ""), None):
            raise LaunchError(f"--{empty} has no value: a variable of the command may be unset")
        if not left:
            raise LaunchError(f"torchrun starts no script: {shlex.join(words[launcher:])[:200]}")
        words = left
    # `mindspeed-lite run` imports what a dry run imports as well.
    before = words.index("run") + 1 if words[words[0] == "-m"].endswith(("mindspeed-lite", "mindspeed_lite")) else 0
    words = words[before:]
    if words[0] != "-m" and not os.path.isfile(os.path.join(folder, words[0])):
        raise LaunchError(f"there is no script {words[0]} in {folder}")
    if not (per_node.isdecimal() and nodes.isdecimal() and int(per_node) * int(nodes)):
        raise LaunchError(
            f"--nproc-per-node {per_node} and --nnodes {nodes} do not say how many ranks there will be: give numbers"
        )
    local = int(per_node) if launcher else 8
    ranks = int(per_node) * int(nodes)
    kept, unquoted = _joined(words)
    return TrainingLaunch(interpreter, before > 0, kept, folder, environment, ranks, local, unquoted)


def _torchrun(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Options of torchrun, and the script or module that it starts with its arguments."""
    options: dict[str, str] = {}
    while words and words[0].startswith("-"):
        name, has_value, value = words[0].lstrip("-").replace("_", "-").partition("=")
        words = words[1:]
        # A prefix suffices.
        known = name if name in _OPTIONS else next((each for each in _OPTIONS if each.startswith(name)), None)
        if known is None:
            raise LaunchError(f"torchrun has no option --{name}")
        if not has_value and known not in _SWITCHES and words and not words[0].startswith("-"):
            value, words = words[0], words[1:]
        options[known] = value
    is_module = bool(words) and not options.keys().isdisjoint(("m", "module"))
    return options, ["-m", *words] if is_module else words


def _joined(words: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Words without those that follow a path, up to the next flag; flags of such paths."""
    kept: list[str] = []
    unquoted: list[str] = []
    flag, given = "", 0
    for word in words:
        if word.startswith("-"):
            flag, given = word.partition("=")[0], int("=" in word)
        given += 1
        if given > 2 and flag.endswith(_PATHS) and flag not in _LISTS:
            unquoted += [flag] * (flag not in unquoted)
        else:
            kept.append(word)
    return tuple(kept), tuple(unquoted)
