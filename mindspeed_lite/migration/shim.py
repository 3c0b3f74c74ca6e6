"""A `mindspeed` package for scripts that import `mindspeed.megatron_adaptor`.

Two files in a folder for PYTHONPATH; never written where MindSpeed is installed.
"""

from __future__ import annotations

import importlib.machinery
import sys
from pathlib import Path

_MARK = "mindspeed_lite's stand-in for MindSpeed"

_PACKAGE = f'''"""{_MARK}: `mindspeed.megatron_adaptor` is mindspeed_lite's; there is nothing else in it.

Written by `mindspeed-lite migrate --shim`. Remove this folder to be rid of it.
"""
'''

_ADAPTOR = f'''"""{_MARK}: importing it imports mindspeed_lite.megatron_adaptor."""

import logging

import mindspeed_lite.megatron_adaptor

logging.getLogger("mindspeed_lite").warning("mindspeed.megatron_adaptor is mindspeed_lite's: %s", __file__)
'''


def write_shim(folder: Path) -> Path:
    """Write the package into `folder`, for PYTHONPATH; return its path.

    Raises OSError, FileExistsError for a foreign `mindspeed`.
    """
    package = folder / "mindspeed"
    found = importlib.machinery.PathFinder.find_spec("mindspeed", [str(folder), *sys.path])
    origin = None if found is None else found.origin
    if origin is None and package.exists() and any(package.iterdir()):
        origin = str(package)
    if origin is not None and not _is_ours(Path(origin)):
        raise FileExistsError(f"MindSpeed itself is there ({origin}); the stand-in is never put over it")
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(_PACKAGE, encoding="utf-8")
    (package / "megatron_adaptor.py").write_text(_ADAPTOR, encoding="utf-8")
    return package


def _is_ours(path: Path) -> bool:
    return path.is_file() and _MARK in path.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
