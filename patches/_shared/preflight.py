"""Rejects arguments on which Megatron would fail late, with a traceback on every rank."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

from mindspeed_lite.engine import OptionError

_LAYOUT = ("tensor_model", "pipeline_model", "context")
_PREFIXES = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
_FILES = ("data_args_path", "per_split_data_args_path")


def check(args: Mapping[str, Any]) -> None:
    problem = next(iter((*_processes(args), *_data(args))), None)
    if problem is not None:
        raise OptionError(problem)


def _processes(args: Mapping[str, Any]) -> Iterator[str]:
    sizes = {name: 1 if (size := args.get(f"{name}_parallel_size")) is None else size for name in _LAYOUT}
    wrong = [f"{_flag(name)}-parallel-size {size}: must be at least 1." for name, size in sizes.items() if size < 1]
    yield from wrong
    if wrong:
        return
    wanted, world = math.prod(sizes.values()), args.get("world_size")
    if world and world % wanted:
        flags = " ".join(f"{_flag(name)}-parallel-size {size}" for name, size in sizes.items() if size > 1)
        yield (
            f"{flags}: needs {wanted} processes, or a multiple of them, and this training has {world}. Start it with "
            f"torchrun --nproc-per-node {wanted}, or choose smaller sizes."
        )


def _data(args: Mapping[str, Any]) -> Iterator[str]:
    # Only rank 0 is sure to read data.
    if args.get("mock_data") or os.environ.get("RANK", "0") != "0":
        return
    for name in _FILES:
        path = args.get(name)
        if isinstance(path, str) and not _is_remote(path) and not os.path.exists(path):
            yield f"{_flag(name)} {path}: there is no such file."
    for name in _PREFIXES:
        given = args.get(name)
        for path in given if isinstance(given, (list, tuple)) else ():
            if isinstance(path, str) and not _is_number(path) and not _is_remote(path) and not os.path.exists(path):
                missing = [path + end for end in (".idx", ".bin") if not os.path.exists(path + end)]
                if missing:
                    yield (
                        f"{_flag(name)} {path}: there is no {' and no '.join(missing)}. Give the prefix that "
                        "tools/preprocess_data.py of Megatron-LM wrote, or --mock-data."
                    )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _is_remote(path: str) -> bool:
    return "://" in path


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
