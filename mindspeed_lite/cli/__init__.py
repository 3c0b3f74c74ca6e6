"""The command `mindspeed-lite`: dispatches subcommands and prints errors in one line.

Imports only the standard library, so that help and usage errors are instant. A subcommand is a module here: its
docstring is the help, `add_options(parser)` adds options, and `main(options)` returns the exit code.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from mindspeed_lite._version import __version__

__all__ = ["main"]

PROGRAM = "mindspeed-lite"

COMMANDS = {
    "run": "run a training script with mindspeed_lite, without changing a line of it",
    "features": "every feature: flags, what it swaps, verified Megatron versions, backends",
    "bench": "a training command with features off and on: speed, memory, loss, where the time goes",
    "bench-ops": "time every operator against plain PyTorch",
    "dryrun": "any rank of a training command on this machine without a device: memory, messages, whether they match",
    "plan": "time and memory of a training command by prediction, and its fastest layouts over so many devices",
    "links": "under torchrun: how fast links, groups and ranks are, what is slow, and a better order of ranks",
    "calibrate": "time this machine's operators and collectives, for `plan --device here`",
    "schedule": "the pipeline schedule of a training command, drawn and simulated, with other orders",
    "balance": "how even experts or sequence lengths load ranks, and what balancing them gains",
    "migrate": "what becomes of a MindSpeed script's flags, and the script translated",
    "doctor": "what is there, what is missing and how to get it",
}
REMOVED = {
    "memory": "`plan --this --device h100 -- COMMAND` predicts from its arguments, "
    "`dryrun -- COMMAND` runs it without storage",
}


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    command, rest = (given[0], given[1:]) if given else ("", [])
    if command in ("", "-h", "--help"):
        _show_commands()
        return 0 if command else 2
    if command == "--version":
        print(f"{PROGRAM} {__version__}")
        return 0
    if command == "run":  # transparent to the script
        from . import run

        return run.main(rest)
    from . import terminal

    program = f"{PROGRAM} {command}" if command in COMMANDS else PROGRAM
    try:
        if command in REMOVED:
            raise terminal.CommandError(f"{command} is no command any more: {REMOVED[command]}")
        if command not in COMMANDS:
            kind = "option" if command[0] == "-" else "command"
            raise terminal.CommandError(f"there is no {kind} {command!r}; {terminal.suggestion(command, COMMANDS)}")
        module = importlib.import_module(f"{__name__}.{command.replace('-', '_')}")
        parser = terminal.Parser(program, str(module.__doc__))
        module.add_options(parser)
        code = int(module.main(parser.parse(rest)))
        sys.stdout.flush()
        return code
    except terminal.CommandError as error:
        return terminal.fail(program, error, error.code)
    except KeyboardInterrupt:
        return terminal.fail(program, "interrupted", 130)
    except BrokenPipeError:
        # Reader gone (`| head`): flushing at exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except SystemExit as ending:
        if not isinstance(ending.code, int):
            raise
        return ending.code
    except Exception as error:
        from mindspeed_lite import error_exit

        text = error_exit.describe(error)
        if text is None or error_exit.wants_traceback():
            raise
        return terminal.fail(program, text)


def _show_commands() -> None:
    from . import terminal

    options = {"--version": "print the version", "-h, --help": "print this; COMMAND --help explains one command"}
    lines = [
        f"usage: {PROGRAM} COMMAND ...",
        "",
        "A non-invasive accelerator for Megatron-LM: one import line, features by flag.",
    ]
    for title, names in (("commands", COMMANDS), ("options", options)):
        lines += ["", f"{title}:", *(f"  {name:10}  {meaning}" for name, meaning in names.items())]
    print("\n".join(terminal.reflowed("\n".join(lines), terminal.width())))
