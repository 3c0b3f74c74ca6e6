"""`mindspeed-lite run`: the script cannot tell the difference."""

import json
import os
import signal
import sys

import pytest

from mindspeed_lite.platform import allocator
from tests.harness.commands import command, fails_in_one_line, python, without

# How a script was started, as it sees it.
SCRIPT = """\
import json, os, sys
print(json.dumps({
    "argv": [os.path.join(os.getcwd(), sys.argv[0]), *sys.argv[1:]], "path0": sys.path[0], "name": __name__,
    "file": __file__, "main": sys.modules["__main__"].__dict__ is globals(), "package": __package__ or "",
    "code": sys._getframe().f_code.co_filename,
    "future": bool(sys._getframe().f_code.co_flags & 0x1000000),
}))
"""
OFF = {"MINDSPEED_LITE_DISABLE": "1"}
ARGUMENTS = ("--help", "-m", "--", "--allocator", "a b", "")


@pytest.fixture
def folder(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (tmp_path / "elsewhere").mkdir()
    for name in ("script.py", "package/__init__.py", "package/__main__.py", "package/module.py"):
        (tmp_path / name).write_text("" if name.endswith("__init__.py") else SCRIPT)
    (tmp_path / "elsewhere" / "link.py").symlink_to("../script.py")
    return tmp_path


@pytest.mark.parametrize(
    ("what", "safe"),
    [
        ("script.py", True),
        ("elsewhere/link.py", False),
        ("-m package", True),
    ],
)
def test_is_python_itself(folder, what, safe):
    for variables in ({}, {"PYTHONSAFEPATH": "1"})[: 1 + (safe and sys.version_info >= (3, 11))]:
        plain = python(*what.split(), *ARGUMENTS, cwd=folder, path=[folder], **variables)
        run = command("run", *what.split(), *ARGUMENTS, cwd=folder, path=[folder], **variables, **OFF)
        assert plain.returncode == run.returncode == 0, run.stderr
        assert json.loads(run.stdout) == json.loads(plain.stdout)


@pytest.mark.parametrize(
    "body",
    [
        "raise SystemExit('said')",
        "def f(): 1 / 0\nf()",
        "x = = 1",
        "import sys; sys.excepthook = lambda *found: print(found[0].__name__, found[2].tb_lineno)\n\n1 / 0",
        "import atexit; atexit.register(lambda: print(later)); later = 5",
    ],
)
def test_ends_as_python_ends(tmp_path, body):
    (tmp_path / "script.py").write_text(body)
    plain = python("script.py", cwd=tmp_path)
    run = command("run", "script.py", cwd=tmp_path, **OFF)
    assert (run.returncode, run.stdout, run.stderr) == (plain.returncode, plain.stdout, plain.stderr)


def test_an_interrupt_stays_an_interrupt(tmp_path):
    (tmp_path / "script.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    assert command("run", "script.py", cwd=tmp_path, **OFF).returncode == -signal.SIGINT


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((), "no script given"),
        (("missing.py",), "missing.py"),
        (("-m",), "needs a module"),
        (("-m", "json.no_such"), "json.no_such"),
        (("--fast", "script.py"), "--fast"),
        (("--allocator",), "needs a value"),
        (("--allocator=", "script.py"), "keep or system"),
        (("empty",), "no script 'empty'"),
        (("of_llm.py",), "imports mindspeed_llm, which is MindSpeed's: start Megatron-LM's own script"),
    ],
)
def test_what_cannot_start_is_one_line(tmp_path, arguments, word):
    (tmp_path / "empty").mkdir()
    (tmp_path / "of_llm.py").write_text("from mindspeed_llm import megatron_adaptor")
    fails_in_one_line(command("run", *arguments, cwd=tmp_path, **OFF), word)


def test_this_python_comes_first_on_path_where_it_is_missing(tmp_path):
    (tmp_path / "script.py").write_text("import os, sys; print(os.environ['PATH'], 'torch' in sys.modules)")
    binaries = os.path.dirname(sys.executable)
    there = f"/usr/bin{os.pathsep}{binaries}"
    for path, expected in (("/usr/bin", f"{binaries}{os.pathsep}/usr/bin"), (there, there)):
        assert command("run", "script.py", cwd=tmp_path, PATH=path, **OFF).stdout.split() == [expected, "False"]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("MINDSPEED_LITE_ALLOCATOR", "fast", ["MINDSPEED_LITE_ALLOCATOR=fast", "keep or system"]),
        ("MINDSPEED_LITE_DEVICE", "tpu", ["MINDSPEED_LITE_DEVICE", "tpu"]),
    ],
)
def test_a_bad_variable_is_one_line(tmp_path, name, value, words):
    (tmp_path / "script.py").write_text("print('started')")
    fails_in_one_line(command("run", "script.py", cwd=tmp_path, **{name: value}), *words)


def test_without_torch_it_says_so_in_one_line(tmp_path):
    (tmp_path / "script.py").write_text("print('started')")
    run = command("run", "script.py", cwd=tmp_path, **without(tmp_path, "torch"))
    fails_in_one_line(run, "torch", "doctor")


ADAPTED = """\
import sys
import torch
import mindspeed_lite
from mindspeed_lite import platform
from mindspeed_lite.platform import allocator
print(sys.argv[1:], platform.current().name, torch.cuda.is_available(), allocator.keeps())
print("megatron" in sys.modules, "mindspeed_lite.megatron_adaptor" in sys.modules)
torch.distributed.init_process_group("gloo", rank=0, world_size=1)  # without a launcher as well
"""


@pytest.mark.parametrize("choice", ["keep", "system"])
def test_the_adaptor_is_there_before_the_first_line(tmp_path, choice):
    (tmp_path / "script.py").write_text(ADAPTED)
    arguments = ("--allocator", choice, "script.py", "--flag", "--", "--help")
    run = command("run", *arguments, cwd=tmp_path, MINDSPEED_LITE_DEVICE="cpu")
    kept = choice == "keep" and not allocator.why_not()
    assert run.stdout.splitlines() == [f"['--flag', '--', '--help'] cpu True {kept}", "False True"], run.stderr
