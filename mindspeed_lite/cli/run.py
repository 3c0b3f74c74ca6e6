"""usage: mindspeed-lite run [OPTIONS] SCRIPT [ARGS...]
       mindspeed-lite run [OPTIONS] -m MODULE [ARGS...]

Runs SCRIPT as `python SCRIPT ARGS` would, with mindspeed_lite imported before its first line. What follows
SCRIPT is the script's; features are chosen there, by their flags:

  mindspeed-lite run pretrain_gpt.py --use-flash-attn ...
  torchrun --nproc-per-node 8 -m mindspeed_lite run pretrain_gpt.py --use-flash-attn ...

options:
  -m MODULE           run a module instead of a file
  --allocator keep    on the CPU, freed memory stays with the process (default): faster, more resident
  --allocator system  on the CPU, freed memory goes back to the kernel
  --bind auto         bind each rank's threads to its share of the cores near its device
  --bind none         leave them to the system (default)
  --rank-order FILE   number torchrun's ranks in the order that FILE proposes; `mindspeed-lite links` wrote it
  -h, --help          print this; after SCRIPT it is the script's

environment:
  MINDSPEED_LITE_ALLOCATOR  keep or system, where --allocator is not given
  MINDSPEED_LITE_BIND       auto or none, where --bind is not given; also without `mindspeed-lite run`
  MINDSPEED_LITE_DEVICE     npu, cuda, cpu or auto
  MINDSPEED_LITE_DISABLE    1: run the script without mindspeed_lite
  MINDSPEED_LITE_TRACEBACK  1: show the traceback of an error of mindspeed_lite, or of a lost rank
  MASTER_ADDR, MASTER_PORT  set for a single process where no launcher has

exit code: the script's; 2 if it could not be started, or ended with an error of mindspeed_lite or because another rank
was lost.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from collections.abc import Sequence

from mindspeed_lite import error_exit, platform
from mindspeed_lite.platform import allocator, binding

from . import rank_order, terminal
from .terminal import CommandError

PROGRAM = "mindspeed-lite run"
_CHOICES = {
    "--allocator": "keep or system",
    "--bind": "auto or none",
    "--rank-order": "the file that `mindspeed-lite links --json FILE` wrote",
}


def main(arguments: Sequence[str]) -> int:
    """Run a script; `sys.argv`, `sys.path[0]`, `__main__`, exit codes and tracebacks are those of plain python."""
    rest = list(arguments)
    try:
        allocator_choice, is_module = _options(rest)
        if is_module is None:
            print("\n".join(terminal.reflowed(str(__doc__), terminal.width())))
            return 0
        if not rest:
            raise CommandError(f"-m needs a module (see {PROGRAM} --help)" if is_module else "no script given")
        name = rest[0]
        if not is_module and not os.path.isfile(name):
            raise CommandError(f"there is no script {name!r} in {os.getcwd()}")
        _prepare_process(os.getcwd() if is_module else os.path.dirname(os.path.realpath(name)))
        _import_adaptor(allocator_choice)
    except CommandError as error:
        error_exit.print_error(str(error), PROGRAM)
        return error_exit.EXIT_CODE
    sys.argv[:] = rest
    try:
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(os.path.join(os.getcwd(), name), run_name="__main__")
    except Exception as error:
        return _show_traceback(error, name)
    return 0


def _show_traceback(error: Exception, name: str) -> int:
    """Show an uncaught error as plain python would, without the frames of this file and runpy."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
        trace = trace.tb_next
    if trace is None and isinstance(error, ImportError):
        error_exit.print_error(f"there is no module {name!r} to run: {error}", PROGRAM)
        return error_exit.EXIT_CODE
    missing = str(getattr(error, "name", None))
    if isinstance(error, ImportError) and missing.partition(".")[0] in ("mindspeed", "mindspeed_llm"):
        hint = "start Megatron-LM's own script, or see `mindspeed-lite migrate --help`"
        error_exit.print_error(f"{name} imports {missing}, which is MindSpeed's: {hint}", PROGRAM)
        return error_exit.EXIT_CODE
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    return 1


def _options(rest: list[str]) -> tuple[str, bool | None]:
    """Take options off `rest`: the allocator, and whether a module follows; None for help.

    `--bind` goes to the environment, where the device layer looks, and so does this process's place of `--rank-order`.
    """
    chosen: dict[str, str] = {}
    is_module: bool | None = False
    while rest and rest[0].startswith("-") and not is_module:
        word = rest.pop(0)
        if word in ("-h", "--help"):
            return "", None
        if word == "--":
            break
        flag, has_value, value = word.partition("=")
        is_module = word == "-m"
        if flag in _CHOICES:
            if not has_value and not rest:
                raise CommandError(f"{flag} needs a value: {_CHOICES[flag]}")
            chosen[flag] = value if has_value else rest.pop(0)
        elif not is_module:
            raise CommandError(f"there is no option {word!r}; a script's own stand after it (see {PROGRAM} --help)")
    try:
        if "--rank-order" in chosen:
            rank_order.apply(chosen["--rank-order"])
        os.environ[binding.BIND_VARIABLE] = binding.wanted(chosen.get("--bind"))
        return allocator.wanted(chosen.get("--allocator")), is_module
    except platform.DeviceError as error:
        raise CommandError(error) from error


def _prepare_process(folder: str) -> None:
    # A safe path has no folder in front; Python 3.10 knows only -I.
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        sys.path[0] = folder
    # torch.distributed needs an address even for one process without a launcher.
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} & set(os.environ):
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ.get("MASTER_PORT", "0"))  # 0: any free port
    # A Megatron checkout runs `make`, which calls python3 from PATH.
    binaries = os.path.dirname(sys.executable)
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    if binaries and binaries not in folders:
        os.environ["PATH"] = os.pathsep.join([binaries, *folders])


def _import_adaptor(allocator_choice: str) -> None:
    try:
        importlib.import_module("mindspeed_lite.megatron_adaptor")
    except Exception as error:  # DeviceError, or a device extension that does not load
        text = error_exit.describe(error)
        if text is None and not isinstance(error, (ImportError, RuntimeError)):
            raise
        hint = "; `mindspeed-lite doctor` says what is missing" if isinstance(error, ImportError) else ""
        raise CommandError(text or f"{error}{hint}") from error
    device = platform.current()
    if allocator_choice == allocator.KEEP and device is not None and device.name == "cpu":
        # Works before and after torch's import; doctor reports failures.
        allocator.keep_freed_memory()
