"""`mindspeed-lite run`: a training script with mindspeed_lite, as if its first line imported the adaptor.

The script must not be able to tell: `sys.argv`, `sys.path[0]`, `__main__`, exit codes and tracebacks are
those of `python SCRIPT ARGS`, or of `python -m MODULE ARGS`.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import os
import pkgutil
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader

from mindspeed_lite import error_exit, platform
from mindspeed_lite.platform import allocator

PROGRAM = "mindspeed-lite run"

HELP = f"""\
usage: {PROGRAM} [--allocator keep|system] SCRIPT [ARGS...]
       {PROGRAM} [--allocator keep|system] -m MODULE [ARGS...]

Runs SCRIPT as `python SCRIPT ARGS` would, with mindspeed_lite imported before its first line. What stands
after SCRIPT is the script's, untouched; features are chosen there, by their flags:

  {PROGRAM} pretrain_gpt.py --use-flash-attn ...
  torchrun --nproc-per-node 8 -m mindspeed_lite run pretrain_gpt.py --use-flash-attn ...

options:
  -m MODULE          run a module instead of a file
  --allocator keep   on the CPU, freed memory stays with the process (default): faster, more resident
  --allocator system on the CPU, freed memory goes back to the kernel
  -h, --help         print this; after SCRIPT it is the script's

environment:
  MINDSPEED_LITE_ALLOCATOR  keep or system, where --allocator is not given
  MINDSPEED_LITE_DEVICE     npu, cuda, cpu or auto
  MINDSPEED_LITE_DISABLE    1: run the script without mindspeed_lite
  MINDSPEED_LITE_TRACEBACK  1: show the traceback of an error of mindspeed_lite, or of a lost rank
  MASTER_ADDR, MASTER_PORT  set for a single process where no launcher has

exit code: the script's; 2 if it could not be started, or ended with an error of mindspeed_lite or for want of
another rank."""


class _UsageError(Exception):
    """The command line does not say what to run."""


@dataclass(frozen=True)
class _Request:
    """What to run: a path, or with `is_module` a module's name."""

    what: str
    arguments: list[str]
    is_module: bool
    allocator: str


def main(arguments: Sequence[str]) -> int:
    """Run the script named by `arguments`; its exit passes through, its exception becomes exit code 1."""
    try:
        request = _parse(arguments)
        if request is None:
            print(HELP)
            return 0
        _check_there(request)
        _prepare_process(request)
        _import_adaptor(request.allocator)
        code, module = _load(request)
    except _UsageError as error:
        error_exit.print_error(" ".join(str(error).split()), PROGRAM)
        return error_exit.EXIT_CODE
    except SyntaxError as error:  # of the script: python shows it without any frame
        sys.excepthook(type(error), error.with_traceback(None), None)
        return 1
    sys.argv[:] = [_argv0(request, module), *request.arguments]
    return _execute(code, module)


def _parse(arguments: Sequence[str]) -> _Request | None:
    """None asks for help. By hand, because everything after the script must stay as it is."""
    rest = list(arguments)
    chosen: str | None = None
    is_module = False
    while rest:
        word = rest.pop(0)
        if word in ("-h", "--help"):
            return None
        if word == "--allocator" or word.startswith("--allocator="):
            _, has_value, chosen = word.partition("=")
            if not has_value:
                if not rest:
                    raise _UsageError("--allocator needs a value: keep or system")
                chosen = rest.pop(0)
        elif word == "-m":
            is_module = True
            break
        elif word.startswith("-") and word != "--":
            raise _UsageError(f"there is no option {word!r}; a script's own stand after it (see {PROGRAM} --help)")
        else:
            if word != "--":
                rest.insert(0, word)
            break
    try:
        allocator_choice = allocator.wanted(chosen)
    except ValueError as error:
        raise _UsageError(error) from error
    if not rest:
        raise _UsageError(f"-m needs a module (see {PROGRAM} --help)" if is_module else "no script given")
    return _Request(rest[0], rest[1:], is_module, allocator_choice)


def _check_there(request: _Request) -> None:
    """Before anything expensive: whether there is something to run."""
    if not request.is_module and not os.path.exists(request.what):
        raise _UsageError(f"there is no script {request.what!r} in {os.getcwd()}")


def _prepare_process(request: _Request) -> None:
    """`sys.path` and PATH as the script needs them, before anything of Megatron is looked for."""
    # A safe path has no folder in front, and would have none for the script. Python 3.10 knows only -I.
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        folder = os.getcwd() if request.is_module else os.path.dirname(os.path.realpath(request.what))
        if _is_archive(request):
            folder = os.path.join(os.getcwd(), request.what)
        sys.path[0] = folder
    elif _is_archive(request):
        sys.path.insert(0, os.path.join(os.getcwd(), request.what))
    # Without a launcher one process is all there is, and torch.distributed asks where it meets itself.
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} & set(os.environ):
        # Any free port.
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ.get("MASTER_PORT", "0"))
    # A Megatron checkout builds its dataset helper with `make`, which calls python3 from PATH.
    binaries = os.path.dirname(sys.executable)
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    if binaries and binaries not in folders:
        os.environ["PATH"] = os.pathsep.join([binaries, *folders])


def _is_archive(request: _Request) -> bool:
    """Whether the script is a folder or an archive, in which python looks for `__main__`."""
    if request.is_module:
        return False
    return os.path.isdir(request.what) or pkgutil.get_importer(os.path.abspath(request.what)) is not None


def _import_adaptor(choice: str) -> None:
    """Device layer and argument hooks on; with MINDSPEED_LITE_DISABLE nothing at all, not even torch."""
    try:
        importlib.import_module("mindspeed_lite.megatron_adaptor")
    except ImportError as error:
        text = error_exit.describe(error) or f"{error}; `mindspeed-lite doctor` says what is missing"
        raise _UsageError(text) from error
    except RuntimeError as error:  # DeviceError, or a torch whose device extension does not load
        raise _UsageError(error_exit.describe(error) or error) from error
    device = platform.current()
    if choice == allocator.KEEP and device is not None and device.name == "cpu":
        # After torch's import, which is as effective as before it; a reason why not is doctor's to tell.
        allocator.keep_freed_memory()


def _load(request: _Request) -> tuple[types.CodeType, types.ModuleType]:
    """The code to run and a fresh `__main__`, with the attributes python gives it."""
    main_module = types.ModuleType("__main__")
    main_module.__dict__["__builtins__"] = builtins
    if sys.version_info < (3, 14):
        main_module.__annotations__ = {}
    if request.is_module or _is_archive(request):
        spec = _module_spec(request.what) if request.is_module else _archive_spec(request.what)
        code = spec.loader.get_code(spec.name)  # type: ignore[union-attr]
        if code is None:
            raise _UsageError(f"{request.what} has no Python code to run")
        main_module.__dict__.update(
            __file__=spec.origin,
            __cached__=spec.cached,
            __loader__=spec.loader,
            __package__=spec.parent,
            __spec__=spec,
        )
        return code, main_module
    path = request.what
    absolute = os.path.join(os.getcwd(), path)
    try:
        with open(path, "rb") as script:
            compiled: types.CodeType | None = pkgutil.read_code(script)
            script.seek(0)
            source = script.read()
    except OSError as error:
        raise _UsageError(f"{path!r} cannot be read: {error.strerror}") from error
    # Our own `from __future__` lines must not reach the script.
    code = compiled or compile(source, absolute, "exec", dont_inherit=True)
    main_module.__dict__.update(__file__=absolute, __cached__=None, __loader__=SourceFileLoader("__main__", absolute))
    return code, main_module


def _module_spec(name: str) -> ModuleSpec:
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name = f"{name}.__main__"
            spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        # A parent that is not there; an import that fails inside a parent is the user's to see.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        spec = None
    except ValueError:
        spec = None
    if spec is None or spec.loader is None:
        raise _UsageError(f"there is no module {name!r} to run")
    return spec


def _archive_spec(path: str) -> ModuleSpec:
    spec = PathFinder.find_spec("__main__", [os.path.join(os.getcwd(), path)])
    if spec is None or spec.loader is None:
        raise _UsageError(f"there is no __main__.py in {path!r}")
    return spec


def _argv0(request: _Request, module: types.ModuleType) -> str:
    return str(module.__file__) if request.is_module else request.what


def _execute(code: types.CodeType, module: types.ModuleType) -> int:
    """Run as `__main__`; an uncaught exception is shown from the script's first frame on."""
    # Kept for the rest of the process: what the interpreter runs at exit may still belong to it.
    sys.modules["__main__"] = module
    try:
        exec(code, module.__dict__)
    except Exception as error:
        # The first entry of the traceback is this frame; the script's own follow.
        trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
        error = error.with_traceback(trace)
        sys.excepthook(type(error), error, trace)
        return 1
    return 0
