"""Lets a training process join throttled links (`lab/links.py`); its folder is first on PYTHONPATH.

A `sitecustomize` that this one shadows is run.
"""

import json
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


class _Watch:
    """Joins just before mindspeed_lite or Megatron is imported; launchers import neither."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in ("megatron", "mindspeed_lite"):
            sys.meta_path.remove(self)  # type: ignore[arg-type, unused-ignore]
            sys.path.append(os.path.dirname(os.path.dirname(_HERE)))
            from lab import links

            links.join(**json.loads(os.environ[links.VARIABLE]))


def _run_the_shadowed_one() -> None:
    # It may look for one that it shadows itself, and must not find this one.
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder or ".") != _HERE]
    for folder in sys.path:
        path = os.path.join(folder, "sitecustomize.py")
        if os.path.isfile(path):
            with open(path) as file:
                exec(compile(file.read(), path, "exec"), {"__name__": "sitecustomize", "__file__": path})
            return


_run_the_shadowed_one()
sys.meta_path.insert(0, _Watch())  # type: ignore[arg-type, unused-ignore]
