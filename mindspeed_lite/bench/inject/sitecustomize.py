"""Starts the benchmark's worker in a training process; its folder is first on PYTHONPATH.

Imports only the standard library until the process looks for Megatron. Runs the `sitecustomize` that it shadows.
"""

import importlib.util
import os
import runpy
import sys

_PLAN = "MINDSPEED_LITE_BENCH"
_HERE = os.path.dirname(os.path.abspath(__file__))


class _Watch:
    """Calls the worker just before Megatron is imported."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] == "megatron":
            sys.meta_path.remove(self)  # type: ignore[arg-type, unused-ignore]
            if importlib.util.find_spec("mindspeed_lite") is None:
                sys.path.append(os.path.abspath(os.path.join(_HERE, "..", "..", "..")))
            from mindspeed_lite.bench import worker

            worker.start(os.environ[_PLAN])


if os.environ.get(_PLAN):
    sys.meta_path.insert(0, _Watch())  # type: ignore[arg-type, unused-ignore]
for _folder in sys.path:
    _path = os.path.join(os.path.abspath(_folder or "."), "sitecustomize.py")
    if os.path.isfile(_path) and os.path.dirname(_path) != _HERE:
        runpy.run_path(_path, run_name="sitecustomize")
        break
