"""The command itself: help, version, errors, and what it costs to ask."""

import pytest

from mindspeed_lite import __version__, cli
from tests.harness.commands import command, python


def test_help_names_every_command():
    run = command("--help")
    assert run.returncode == 0 and run.stderr == ""
    assert all(name in run.stdout for name in cli.COMMANDS)


def test_version():
    run = command("--version")
    assert (run.returncode, run.stdout) == (0, f"mindspeed-lite {__version__}\n")


def test_no_command_prints_help_and_is_an_error():
    run = command()
    assert run.returncode == 2 and run.stdout.startswith("usage: mindspeed-lite")


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["features", "-h"], ["doctor", "-h"], ["xyz"]])
def test_asking_for_help_imports_no_torch(arguments):
    asks = (
        "import sys\nfrom mindspeed_lite.cli import main\n"
        f"try: main({arguments!r})\nexcept SystemExit: pass\n"
        "assert not {'torch', 'numpy', 'wrapt', 'megatron', 'rich'} & set(sys.modules), sorted(sys.modules)"
    )
    run = python("-c", asks)
    assert run.returncode == 0, run.stderr


def test_a_reader_that_leaves_is_no_traceback():
    program = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import sys; from mindspeed_lite.cli import main; "
        "from mindspeed_lite.cli import doctor; doctor.main = lambda rest: print(chr(10) * 10**6) or 0; "
        'sys.exit(main(["doctor"]))\'], stdout=subprocess.PIPE, stderr=subprocess.PIPE)\n'
        "child.stdout.close()\n"
        "print(child.stderr.read().decode(), child.wait())"
    )
    assert python("-c", program).stdout.split() == ["1"]
