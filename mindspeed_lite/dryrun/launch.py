"""Finds what a launch command starts, by running it with launchers that only write down their arguments."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_lite.child_process import child_process

# Programs that a launch command may start training with; they take torchrun's options.
_LAUNCHERS = ("torchrun", "mindspeed-lite", "python", "python3", f"python3.{sys.version_info.minor}")
_MODULES = ("torch.distributed.run", "torch.distributed.launch", "torch.distributed.torchrun")
_TIMEOUT = 60.0
# Written in place of a launcher: hands on what starts no training.
_STAND_IN = """#!{python}
import json, os, sys
name, arguments = {name!r}, sys.argv[1:]
ours = name == "mindspeed-lite"
starts = arguments[:1] == ["run"] if ours else name == "torchrun" or (
    arguments[:1] and (arguments[0].endswith(".py") or arguments[:2] in {modules!r})
)
if starts:
    with open({record!r}, "a") as file:
        found = {{"program": name, "arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}}
        file.write(json.dumps(found) + "\\n")
    sys.exit(0)
os.execv({python!r}, [{python!r}, *["-m", "mindspeed_lite"] * ours, *arguments])
"""


class LaunchError(Exception):
    """No training was found in the command; one line."""


@dataclass(frozen=True)
class TrainingLaunch:
    """A script as a launcher would start it.

    words: script and its arguments, or `-m`, module and its. is_run: through `mindspeed_lite run`.
    """

    interpreter: str
    is_run: bool
    words: tuple[str, ...]
    folder: str
    environment: dict[str, str]
    world_size: int
    local_size: int


def find(command: Sequence[str]) -> TrainingLaunch:
    """The training that `command` launches: torchrun, python, or a shell script that calls them. Raises LaunchError."""
    with tempfile.TemporaryDirectory(prefix="mindspeed-lite-dryrun-") as folder:
        record = Path(folder, "record")
        for name in _LAUNCHERS:
            path = Path(folder, name)
            modules = [["-m", each] for each in (*_MODULES, "mindspeed_lite")]
            path.write_text(_STAND_IN.format(python=sys.executable, name=name, record=str(record), modules=modules))
            path.chmod(0o700)
        words = [*command]
        if os.path.basename(words[0]) in _LAUNCHERS:
            words[0] = str(Path(folder, os.path.basename(words[0])))
        environment = {**os.environ, "PATH": os.pathsep.join([folder, os.environ.get("PATH", os.defpath)])}
        try:
            with child_process(
                words, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            ) as child:
                printed = child.communicate(timeout=_TIMEOUT)[0].decode(errors="replace")
        except OSError as error:
            raise LaunchError(f"{command[0]} does not run: {error}") from None
        except subprocess.TimeoutExpired:
            raise LaunchError(f"{command[0]} has started no training after {_TIMEOUT:.0f} seconds") from None
        if not record.exists():
            last = printed.strip().splitlines()[-1:] or ["it printed nothing"]
            raise LaunchError(f"{shlex.join(command)[:80]} starts no torchrun and no python script: {last[0]}")
        found = json.loads(record.read_text().splitlines()[-1])
        path = found["environment"]["PATH"].split(os.pathsep)
        found["environment"]["PATH"] = os.pathsep.join(each for each in path if each != folder)
        is_first = found["program"] == os.path.basename(command[0])
        interpreter = _interpreter(command[0] if is_first else found["program"], found["environment"]["PATH"])
    return _read(interpreter, found["program"], found["arguments"], found["folder"], found["environment"])


def _interpreter(program: str, path: str) -> str:
    """The Python that a program is, or is written in."""
    found = shutil.which(program, path=path) or program
    if os.path.basename(program).startswith("python"):
        return found
    with contextlib.suppress(OSError), open(found, "rb") as file:
        named = file.readline().decode(errors="replace").removeprefix("#!").strip()
        if os.path.isfile(named):
            return named
    return shutil.which("python3", path=os.path.dirname(found)) or sys.executable


def _read(interpreter: str, program: str, words: list[str], folder: str, environment: dict[str, str]) -> TrainingLaunch:
    per_node, nodes = environment.get("WORLD_SIZE", "1"), "1"
    if program != "torchrun" and words[:1] == ["-m"] and words[1] in _MODULES:
        program, words = "torchrun", words[2:]
    if program == "torchrun":
        from torch.distributed.run import get_args_parser

        try:
            parsed = get_args_parser().parse_args(words)
        except SystemExit:
            raise LaunchError(f"torchrun does not take these arguments: {shlex.join(words)[:200]}") from None
        per_node, nodes = parsed.nproc_per_node, parsed.nnodes.rpartition(":")[2]
        words = [*(["-m"] if parsed.module else []), parsed.training_script, *parsed.training_script_args]
    # `mindspeed_lite run` imports what a dry run imports as well.
    runs = [["-m", "mindspeed_lite", "run"], ["mindspeed_lite", "run"], ["run"] * (program == "mindspeed-lite")]
    before = next((each for each in runs if each and words[: len(each)] == each), [])
    words = words[len(before) :]
    if not (per_node.isdecimal() and nodes.isdecimal() and int(per_node) * int(nodes)):
        raise LaunchError(
            f"--nproc-per-node {per_node} and --nnodes {nodes} do not say how many ranks there will be: give numbers"
        )
    local = int(per_node) if program == "torchrun" else 8
    return TrainingLaunch(
        interpreter, bool(before), tuple(words), folder, environment, int(per_node) * int(nodes), local
    )


__all__ = ["TrainingLaunch", "LaunchError", "find"]
