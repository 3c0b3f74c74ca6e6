"""The command `mindspeed-lite`: finds the subcommand and leaves the rest to it.

Nothing but the standard library is imported here, so that help and usage errors are instant; a subcommand's
module is imported when it is called.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from mindspeed_lite._version import __version__

__all__ = ["main"]

PROGRAM = "mindspeed-lite"

# Name -> what it does; each is a module of this package ("-" is "_" there) with `main(arguments) -> exit code`.
COMMANDS = {
    "run": "run a training script with mindspeed_lite, without changing a line of it",
    "features": "every feature: flags, what it swaps, verified Megatron versions, backends",
    "bench": "a training command with features off and on: speed, memory, loss, where the time goes",
    "bench-ops": "time every operator against plain PyTorch and installed peers",
    "memory": "what a training command takes on each rank, by what it is for, with and without features",
    "plan": "the fastest layouts of a training command over so many devices, by prediction",
    "calibrate": "time this machine's operators and collectives, for `plan --device here`",
    "schedule": "the pipeline schedule of a training command, drawn and simulated, beside other orders",
    "load": "how even the experts of a training were loaded, as a table and a picture",
    "balance": "what balancing experts would have gained in a training's recorded loads",
    "balance-lengths": "what equal attention cost of data-parallel ranks would gain for a data set",
    "migrate": "what becomes of a MindSpeed script's flags, and the script translated",
    "doctor": "what is there, what is missing and how to get it",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; `arguments` are those after the program's name, by default this process's."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given:
        print(_help())
        return 2
    command, rest = given[0], given[1:]
    if command in ("-h", "--help"):
        print(_help())
        return 0
    if command == "--version":
        print(f"{PROGRAM} {__version__}")
        return 0
    if command not in COMMANDS:
        import difflib

        close = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(COMMANDS)}"
        kind = "option" if command.startswith("-") else "command"
        print(f"{PROGRAM}: error: there is no {kind} {command!r}; {hint}", file=sys.stderr)
        return 2
    if command == "run":
        return _call(command, rest)
    try:
        code = _call(command, rest)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"{PROGRAM} {command}: error: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader has left (`| head`); without this, flushing at exit would complain once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _call(command: str, arguments: Sequence[str]) -> int:
    """A subcommand's exit code; an error of this package that it does not catch is one line."""
    from mindspeed_lite import error_exit

    try:
        return int(importlib.import_module(f"{__name__}.{command.replace('-', '_')}").main(arguments))
    except Exception as error:
        text = error_exit.describe(error)
        if text is None or error_exit.wants_traceback():
            raise
        error_exit.print_error(" ".join(text.split()), f"{PROGRAM} {command}")
        return error_exit.EXIT_CODE


def _help() -> str:
    width = max(map(len, COMMANDS)) + 2
    lines = [
        f"usage: {PROGRAM} COMMAND ...",
        "",
        "A non-invasive accelerator for Megatron-LM: one import line, features by flag.",
        "",
        "commands:",
        *(f"  {name:{width}}{summary}" for name, summary in COMMANDS.items()),
        "",
        "options:",
        "  --version   print the version",
        "  -h, --help  print this; `COMMAND --help` explains one command",
    ]
    return "\n".join(lines)
