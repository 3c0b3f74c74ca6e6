"""The demo's text as an indexed dataset of Megatron's: a token is a byte, 256 ends a document, a file is one."""

from __future__ import annotations

import contextlib
import fnmatch
import logging
import os
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

EOD = 256
# What in the standard library's folder is tests, tables rather than text, or not of it.
NOT_TEXT = (
    "test*",
    "site-packages",
    "idlelib",
    "lib2to3",
    "encodings",
    "_sysconfigdata*",
    "entities.py",
    "locale.py",
    "stringprep.py",
    "_casefix.py",
)


def sources(folder: str = sysconfig.get_path("stdlib")) -> Iterator[Path]:
    """The source files of Python's own library, in a stable order."""

    def is_text(name: str) -> bool:
        return not any(fnmatch.fnmatchcase(name, pattern) for pattern in NOT_TEXT)

    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(filter(is_text, folders))
        yield from (Path(parent, name) for name in sorted(names) if name.endswith(".py") and is_text(name))


def convert(files: Iterable[Path], prefix: Path) -> None:
    """Write `prefix`.bin and `prefix`.idx; nothing stands under these names until both are complete."""
    import numpy

    with _quietly():
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    dtype = DType.optimal_dtype(EOD + 1)
    partial = {suffix: prefix.with_name(f"{prefix.name}.part{suffix}") for suffix in (".bin", ".idx")}
    builder = IndexedDatasetBuilder(str(partial[".bin"]), dtype=dtype)
    try:
        for content in filter(None, (file.read_bytes() for file in files)):
            document = numpy.append(numpy.frombuffer(content, dtype=numpy.uint8).astype(dtype), dtype(EOD))
            builder.add_document(document, [document.size])
        builder.finalize(str(partial[".idx"]))
        for suffix, path in partial.items():
            os.replace(path, prefix.with_name(prefix.name + suffix))
    finally:
        builder.data_file.close()
        for path in partial.values():
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Megatron's import tells of packages that a conversion has no use for."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def tokenizer_flags(megatron_version: str) -> list[str]:
    """Megatron's flags for these tokens: 257 ids of which the last ends a document.

    Before 0.18, `NullTokenizer` adds its end-of-document id to the size it is given; since then it is within.
    """
    release = tuple(int(part) for part in re.findall(r"\d+", megatron_version)[:2])
    size = EOD if release < (0, 18) else EOD + 1
    return ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(size)]
