"""`mindspeed-lite run`: the script cannot tell the difference."""

import json
import os
import signal
import sys
import zipfile

import pytest

from mindspeed_lite.platform import allocator
from tests.harness.commands import command, fails_in_one_line, python, without

# Everything a script can see of how it was started; addresses differ between processes.
SCRIPT = """\
import json, re, sys
def plain(value):
    return re.sub("0x[0-9a-f]+", "", repr(value))
print(json.dumps({
    "argv": sys.argv, "path0": sys.path[0], "name": __name__, "file": __file__,
    "main": sys.modules["__main__"].__dict__ is globals(),
    "names": {name: plain(value) for name, value in sorted(globals().items()) if name.startswith("__")},
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
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", SCRIPT)
    return tmp_path


@pytest.mark.parametrize(
    "what",
    [
        ("script.py",),
        ("./script.py",),
        ("elsewhere/../script.py",),
        ("elsewhere/link.py",),
        ("package",),
        ("package/",),
        ("archive.zip",),
        ("-m", "package.module"),
        ("-m", "package"),
    ],
    ids=lambda what: " ".join(what),
)
def test_is_python_itself(folder, what):
    plain = python(*what, *ARGUMENTS, cwd=folder)
    run = command("run", *what, *ARGUMENTS, cwd=folder, **OFF)
    assert plain.returncode == run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == json.loads(plain.stdout)


@pytest.mark.parametrize("what", [("script.py",), ("package",), ("-m", "package.module")])
def test_is_python_itself_with_a_safe_path(folder, what):
    if sys.version_info < (3, 11):
        pytest.skip("Python 3.10 has no safe path")
    variables = {"PYTHONSAFEPATH": "1"}
    plain = python(*what, cwd=folder, path=[folder], **variables)
    run = command("run", *what, cwd=folder, path=[folder], **variables, **OFF)
    assert json.loads(run.stdout) == json.loads(plain.stdout)


@pytest.mark.parametrize(
    "body",
    [
        "import sys; sys.exit(7)",
        "raise SystemExit('said')",
        "import os; os._exit(3)",
        "def f(): 1 / 0\nf()",
        "x = = 1",
        "import nothing_of_that_name",
        "import sys; sys.excepthook = lambda *found: print(found[0].__name__, found[2].tb_lineno)\n\n1 / 0",
        "import atexit; atexit.register(lambda: print(later)); later = 5",
        "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A)",
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise KeyError('second')",
    ],
)
def test_ends_as_python_ends(tmp_path, body):
    (tmp_path / "script.py").write_text(body)
    plain = python("script.py", cwd=tmp_path)
    run = command("run", "script.py", cwd=tmp_path, **OFF)
    assert (run.returncode, run.stdout, run.stderr) == (plain.returncode, plain.stdout, plain.stderr)


def test_an_interrupt_stays_an_interrupt(tmp_path):
    (tmp_path / "script.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    run = command("run", "script.py", cwd=tmp_path, **OFF)
    assert run.returncode == python("script.py", cwd=tmp_path).returncode == -signal.SIGINT


def test_a_compiled_script(tmp_path):
    import py_compile

    (tmp_path / "script.py").write_text("print('compiled')")
    py_compile.compile(str(tmp_path / "script.py"), str(tmp_path / "script.pyc"))
    assert command("run", "script.pyc", cwd=tmp_path, **OFF).stdout == "compiled\n"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((), "no script given"),
        (("missing.py",), "missing.py"),
        (("-m",), "needs a module"),
        (("-m", "no_such.module"), "no_such.module"),
        (("-m", "json.no_such"), "json.no_such"),
        (("--fast", "script.py"), "--fast"),
        (("--allocator",), "needs a value"),
        (("--allocator", "jemalloc", "script.py"), "--allocator jemalloc"),
        (("--allocator=", "script.py"), "keep or system"),
        (("empty",), "__main__"),
    ],
)
def test_what_cannot_start_is_one_line(tmp_path, arguments, word):
    (tmp_path / "empty").mkdir()
    fails_in_one_line(command("run", *arguments, cwd=tmp_path, **OFF), word)


def test_an_unknown_allocator_in_the_environment_is_one_line(tmp_path):
    (tmp_path / "script.py").write_text("print('started')")
    run = command("run", "script.py", cwd=tmp_path, MINDSPEED_LITE_ALLOCATOR="fast", **OFF)
    fails_in_one_line(run, "MINDSPEED_LITE_ALLOCATOR=fast", "keep or system")


def test_this_python_comes_first_on_path_where_it_is_missing(tmp_path):
    (tmp_path / "script.py").write_text("import os; print(os.environ['PATH'])")
    binaries = os.path.dirname(sys.executable)
    without = command("run", "script.py", cwd=tmp_path, PATH="/usr/bin", **OFF)
    assert without.stdout.strip() == f"{binaries}{os.pathsep}/usr/bin"
    there = f"/usr/bin{os.pathsep}{binaries}"
    assert command("run", "script.py", cwd=tmp_path, PATH=there, **OFF).stdout.strip() == there


def test_disabled_is_plain_python(tmp_path):
    (tmp_path / "script.py").write_text("import sys; print('torch' in sys.modules)")
    assert command("run", "script.py", cwd=tmp_path, **OFF).stdout == "False\n"


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


def test_the_adaptor_is_there_before_the_first_line(tmp_path):
    (tmp_path / "script.py").write_text(ADAPTED)
    run = command("run", "script.py", "--help", cwd=tmp_path, MINDSPEED_LITE_DEVICE="cpu")
    kept = not allocator.why_not()
    assert run.stdout.splitlines() == [f"['--help'] cpu True {kept}", "False True"], run.stderr


def test_a_device_that_is_not_there_is_one_line(tmp_path):
    (tmp_path / "script.py").write_text("print('started')")
    run = command("run", "script.py", cwd=tmp_path, MINDSPEED_LITE_DEVICE="tpu")
    fails_in_one_line(run, "MINDSPEED_LITE_DEVICE", "tpu")


def test_under_torchrun_and_with_the_systems_allocator(tmp_path):
    (tmp_path / "script.py").write_text(ADAPTED + "import os\nprint(os.environ['RANK'])")
    run = python(
        *("-m", "torch.distributed.run", "--nproc-per-node", "1", "--standalone"),
        *("-m", "mindspeed_lite", "run", "--allocator", "system", "script.py", "--flag", "--", "--help"),
        cwd=tmp_path,
        MINDSPEED_LITE_DEVICE="cpu",
    )
    assert run.returncode == 0, run.stderr
    expected = ["['--flag', '--', '--help'] cpu True False", "False True", "0"]
    assert run.stdout.splitlines() == expected, run.stderr
