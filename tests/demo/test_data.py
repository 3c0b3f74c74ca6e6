"""A conversion gives Megatron back what was in the files."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo.data import EOD, convert, sources, tokenizer_flags


def read(prefix: Path) -> list[list[int]]:
    """Every document as Megatron's own reader finds it."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    assert list(dataset.document_indices) == list(range(len(dataset) + 1)), "one sequence a document"
    return [dataset[index].tolist() for index in range(len(dataset))]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    (folder / "inner").mkdir(parents=True)
    (folder / "tests").mkdir()
    (folder / "b.py").write_bytes("zwölf\n".encode())
    (folder / "a.py").write_bytes(b"print(1)\n")
    (folder / "empty.py").write_bytes(b"")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    (folder / "inner" / "c.py").write_bytes(bytes(range(256)))
    (folder / "tests" / "d.py").write_bytes(b"assert True\n")
    return folder


def test_every_byte_of_every_document_comes_back_with_its_end(texts: Path, tmp_path: Path) -> None:
    files = [*sources(str(texts))]
    assert [file.name for file in files] == ["a.py", "b.py", "empty.py", "c.py"]
    convert(files, tmp_path / "data")
    assert read(tmp_path / "data") == [[*file.read_bytes(), EOD] for file in files if file.read_bytes()]


def test_a_failed_conversion_leaves_an_earlier_dataset_and_nothing_else(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    prefix = tmp_path / "out" / "data"
    for kept in ([], [prefix.with_suffix(".bin"), prefix.with_suffix(".idx")]):
        with pytest.raises(FileNotFoundError):
            convert([texts / "a.py", texts / "gone.py"], prefix)
        assert sorted(prefix.parent.iterdir()) == kept
        convert([texts / "a.py"], prefix)
    assert read(prefix) == [[*b"print(1)\n", EOD]]


@pytest.mark.parametrize(("version", "size"), [("0.16.1", 256), ("0.17.1", 256), ("0.18.0rc1", 257), ("0.19.2", 257)])
def test_the_flags_give_257_ids_in_every_release(version: str, size: int) -> None:
    assert tokenizer_flags(version) == ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(size)]


def test_the_installed_release_agrees_on_the_number_of_ids_and_the_end_of_a_document() -> None:
    from megatron.core.package_info import __version__
    from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

    tokenizer = NullTokenizer(int(tokenizer_flags(__version__)[-1]))
    assert (tokenizer.vocab_size, tokenizer.eod) == (EOD + 1, EOD)
