"""Turn text files into Megatron's indexed dataset format, one token a byte, for training without a tokenizer.

    python demo/text_to_indexed.py --input docs src --suffix .md .py --output-prefix data/mine --append-eod

Every file is a document. A token is a byte's value, 0 to 255; 256 ends a document. Megatron's `NullTokenizer`
takes such ids as they are; the flags it needs are printed at the end. Needs megatron-core.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

EOD = 256
SUFFIXES = (".md", ".py", ".rst", ".txt")


class InputError(ValueError):
    """The input or the output cannot be used; the text says why."""


@dataclass(frozen=True)
class Written:
    """What a conversion has written."""

    prefix: Path
    documents: int
    tokens: int


def find_files(inputs: Iterable[Path], suffixes: Sequence[str] = SUFFIXES, exclude: Sequence[str] = ()) -> list[Path]:
    """The files among `inputs`, and those in its folders with one of the suffixes; sorted, each of them once.

    Args:
        inputs: files, which are taken whatever their name, and folders, which are searched.
        suffixes: how the names of files in folders must end.
        exclude: names or patterns of folders and files that a search passes over.

    Raises:
        InputError: an input does not exist, or nothing was found.
    """
    found: dict[Path, None] = {}
    for given in inputs:
        if given.is_dir():
            found.update(dict.fromkeys(_search(given, tuple(suffixes), exclude)))
        elif given.is_file():
            found[given] = None
        else:
            raise InputError(f"{given}: there is no such file or folder.")
    if not found:
        raise InputError(f"No files that end in {', '.join(suffixes)} were found.")
    return list(found)


def _search(folder: Path, suffixes: tuple[str, ...], exclude: Sequence[str]) -> Iterator[Path]:
    def taken(name: str) -> bool:
        return not any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude)

    def unreadable(error: OSError) -> None:
        raise InputError(f"{error.filename}: cannot be read ({error.strerror}).")

    for parent, folders, names in os.walk(folder, onerror=unreadable):
        folders[:] = sorted(filter(taken, folders))
        for name in sorted(names):
            if name.endswith(suffixes) and taken(name):
                yield Path(parent, name)


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


def convert(files: Iterable[Path], prefix: Path, append_eod: bool = True) -> Written:
    """Write `prefix`.bin and `prefix`.idx, holding one document in memory at a time.

    Empty files are left out. Nothing stands under the final names until both are complete.

    Raises:
        InputError: a file cannot be read, nothing is in any of them, or the output cannot be written.
    """
    import numpy

    with _quietly():
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    dtype = DType.optimal_dtype(EOD + 1)
    ending = numpy.array([EOD] if append_eod else [], dtype=dtype)
    partial = {suffix: prefix.with_name(f"{prefix.name}.part{suffix}") for suffix in (".bin", ".idx")}
    documents = tokens = 0
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        builder = IndexedDatasetBuilder(str(partial[".bin"]), dtype=dtype)
    except OSError as error:
        raise InputError(f"{prefix}: cannot be written ({error.strerror}).") from error
    try:
        for file in files:
            try:
                content = file.read_bytes()
            except OSError as error:
                raise InputError(f"{file}: cannot be read ({error.strerror}).") from error
            if content:
                ids = numpy.frombuffer(content, dtype=numpy.uint8).astype(dtype)
                document = numpy.concatenate([ids, ending])
                builder.add_document(document, [document.size])
                documents += 1
                tokens += document.size
        if not documents:
            raise InputError("Every file is empty.")
        builder.finalize(str(partial[".idx"]))
        for suffix, path in partial.items():
            os.replace(path, prefix.with_name(prefix.name + suffix))
    except OSError as error:
        raise InputError(f"{prefix}: cannot be written ({error.strerror}).") from error
    finally:
        builder.data_file.close()
        for path in partial.values():
            path.unlink(missing_ok=True)
    return Written(prefix, documents, tokens)


def tokenizer_flags(megatron_version: str) -> list[str]:
    """Megatron's flags for these tokens: 257 ids of which the last ends a document.

    Before 0.18, `NullTokenizer` adds its end-of-document id to the size it is given; since then it is within.
    """
    release = tuple(int(part) for part in re.findall(r"\d+", megatron_version)[:2])
    size = EOD if release < (0, 18) else EOD + 1
    return ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(size)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="text_to_indexed.py", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--input", nargs="+", type=Path, required=True, metavar="PATH", help="To read.")
    parser.add_argument(
        "--output-prefix", type=Path, required=True, metavar="PREFIX", help="Writes PREFIX.bin, PREFIX.idx."
    )
    parser.add_argument("--append-eod", action="store_true", help=f"End every document with the id {EOD}.")
    parser.add_argument(
        "--suffix",
        nargs="+",
        default=SUFFIXES,
        metavar=".EXT",
        help=f"Which files to take from folders (default: {' '.join(SUFFIXES)}).",
    )
    parser.add_argument(
        "--exclude",
        nargs="+",
        default=(),
        metavar="NAME",
        help="Folders and files to pass over, by name or pattern ('test*').",
    )
    args = parser.parse_args(argv)
    replaced = args.output_prefix.with_name(f"{args.output_prefix.name}.idx").exists()
    try:
        files = find_files(args.input, args.suffix, args.exclude)
        written = convert(files, args.output_prefix, args.append_eod)
        from megatron.core.package_info import __version__ as megatron_version
    except InputError as error:
        print(f"text_to_indexed.py: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        print(f"text_to_indexed.py: {error.name} is missing: pip install megatron-core", file=sys.stderr)
        return 1
    print(f"{written.documents} documents, {written.tokens} tokens in {written.prefix}.bin and .idx")
    print(f"--data-path {written.prefix} {' '.join(tokenizer_flags(megatron_version))}")
    if replaced:
        cache = written.prefix.parent / "cache"
        print(f"Replaced a dataset. Delete Megatron's index of its samples: {cache} or --data-cache-path")
    return 0


if __name__ == "__main__":
    sys.exit(main())
