"""The command itself: help, version, errors, and what it costs to ask."""

import subprocess
import sys

from mindspeed_lite import __version__, cli
from tests.harness.commands import command, environment, python


def test_help_and_version():
    run = command("--help")
    assert run.returncode == 0 and run.stderr == "" and all(name in run.stdout for name in cli.COMMANDS)
    run = command("--version")
    assert (run.returncode, run.stdout) == (0, f"mindspeed-lite {__version__}\n")
    run = command()
    assert run.returncode == 2 and run.stdout.startswith("usage: mindspeed-lite")


def test_asking_for_help_imports_no_torch():
    asks = "import sys\nfrom mindspeed_lite.cli import main\n" + "".join(
        f"try: main({arguments!r})\nexcept SystemExit: pass\n"
        for arguments in (["--help"], ["run", "--help"], ["features", "-h"], ["doctor", "-h"], ["plan", "-h"], ["xyz"])
    )
    run = python("-c", f"{asks}assert not {{'torch', 'numpy', 'wrapt', 'megatron', 'rich'}} & set(sys.modules)")
    assert run.returncode == 0, run.stderr


def test_a_reader_that_leaves_is_no_traceback():
    code = (
        "import sys; from mindspeed_lite.cli import main, doctor; "
        "doctor.main = lambda options: print(chr(10) * 10**6) or 0; sys.exit(main(['doctor']))"
    )
    child = subprocess.Popen([sys.executable, "-c", code], env=environment(), stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE)  # fmt: skip
    child.stdout.close()
    assert child.stderr.read() == b"" and child.wait() == 1
