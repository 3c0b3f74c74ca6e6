"""Packages `mindspeed` and `mindspeed_llm` for scripts that import their `megatron_adaptor`.

Four files in a folder for PYTHONPATH; never written where MindSpeed is installed.
"""

from __future__ import annotations

import importlib.machinery
import sys
from pathlib import Path

NAMES = ("mindspeed", "mindspeed_llm")
_MARK = "mindspeed_lite's shim for MindSpeed"

_PACKAGE = f'''"""{_MARK}: has `megatron_adaptor`, which is mindspeed_lite's, and nothing else.

Written by `mindspeed-lite migrate --shim`. Remove this folder to be rid of it.
"""
'''

_ADAPTOR = f'''"""{_MARK}: importing it imports mindspeed_lite.megatron_adaptor."""

import logging

import mindspeed_lite.megatron_adaptor

logging.getLogger("mindspeed_lite").warning("%s is mindspeed_lite's: %s", __name__, __file__)
'''


def write_shim(folder: Path) -> list[Path]:
    """Write the packages into `folder`, for PYTHONPATH; return their paths.

    Raises OSError, FileExistsError for a foreign one.
    """
    packages = [folder / name for name in NAMES]
    for package in packages:
        found = importlib.machinery.PathFinder.find_spec(package.name, [str(folder), *sys.path])
        origin = None if found is None else found.origin
        if origin is None and package.exists() and any(package.iterdir()):
            origin = str(package)
        if origin is not None and not _is_ours(Path(origin)):
            raise FileExistsError(f"{package.name} itself is installed ({origin}), and the shim never replaces it")
    for package in packages:
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text(_PACKAGE, encoding="utf-8")
        (package / "megatron_adaptor.py").write_text(_ADAPTOR, encoding="utf-8")
    return packages


def _is_ours(path: Path) -> bool:
    return path.is_file() and _MARK in path.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
