"""Runs the command line in a process of its own, as a shell would."""

import os
import re
import subprocess
import sys

from tests.harness.checkouts import ROOT

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def environment(path=(), **variables):
    """This process's environment without our variables; `path` comes first on PYTHONPATH."""
    found = {name: value for name, value in os.environ.items() if not name.startswith("MINDSPEED_LITE_")}
    found.pop("COLUMNS", None)
    found.pop("NO_COLOR", None)
    folders = [*map(str, path), str(ROOT), os.environ.get("PYTHONPATH", "")]
    found["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    return {**found, **variables}


def python(*arguments, path=(), cwd=None, timeout=600, **variables):
    """`python ARGUMENTS`; stdout and stderr captured as text."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=environment(path, **variables),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def command(*arguments, **keywords):
    """`mindspeed-lite ARGUMENTS`."""
    return python("-m", "mindspeed_lite", *arguments, **keywords)


def fails_in_one_line(run, *words, code=2):
    """The exit code, nothing on stdout, and one line on stderr that has the words in it."""
    assert run.returncode == code, run.stderr
    assert run.stdout == ""
    assert run.stderr.count("\n") == 1 and run.stderr.startswith("mindspeed-lite"), run.stderr
    for word in words:
        assert word in run.stderr


BLOCKER = """
import os
import sys


class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            return None
        return self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)


BLOCKED = set(os.environ["BLOCKED"].split(","))
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""


def without(folder, *modules):
    """A folder for PYTHONPATH and the variables under which `modules` are not there."""
    (folder / "sitecustomize.py").write_text(BLOCKER)
    return {"path": [folder], "BLOCKED": ",".join(modules)}
