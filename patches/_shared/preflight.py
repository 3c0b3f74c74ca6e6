"""Checks arguments for what Megatron finds out deep inside a run, where its answer is a traceback of every rank."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from mindspeed_lite.engine import OptionError

# Lists of prefixes, which may have weights between them, and files that hold such lists.
_PREFIXES = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
_FILES = ("data_args_path", "per_split_data_args_path")


def check(args: Mapping[str, Any]) -> None:
    """Check Megatron's arguments before Megatron validates them.

    Raises:
        OptionError: training cannot work with them; the text names the flag, the reason and what to do.
    """
    problem = next(iter((*_context_parallelism(args), *_data(args))), None)
    if problem is not None:
        raise OptionError(problem)


def _context_parallelism(args: Mapping[str, Any]) -> Iterator[str]:
    """What `DotProductAttention.__init__` asserts of the local implementation, in every supported release."""
    size = args.get("context_parallel_size") or 1
    if size > 1 and args.get("transformer_impl") == "local":
        yield (
            f"--context-parallel-size {size}: attention over a sequence that is split between ranks is missing: "
            "Megatron has it in Transformer Engine alone, and this training runs on the local implementation. Leave "
            "the flag out, or train on CUDA with Transformer Engine installed."
        )


def _data(args: Mapping[str, Any]) -> Iterator[str]:
    # Rank 0 reads data in every layout; others need not have the files.
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


__all__ = ["check"]
