"""A conversion gives Megatron back what was in the files, or says why it cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from demo import text_to_indexed
from demo.text_to_indexed import EOD, InputError, convert, find_files, tokenizer_flags

ROOT = Path(__file__).resolve().parents[2]


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
    (folder / "b.txt").write_bytes("zwölf\n".encode())
    (folder / "a.py").write_bytes(b"print(1)\n")
    (folder / "empty.py").write_bytes(b"")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    (folder / "inner" / "c.md").write_bytes(bytes(range(256)))
    (folder / "tests" / "d.py").write_bytes(b"assert True\n")
    return folder


def test_every_byte_of_every_document_comes_back_with_its_end(texts: Path, tmp_path: Path) -> None:
    files = find_files([texts])
    written = convert(files, tmp_path / "new" / "data")
    contents = [file.read_bytes() for file in files if file.read_bytes()]
    assert read(written.prefix) == [[*content, EOD] for content in contents]
    assert (written.documents, written.tokens) == (4, sum(len(content) + 1 for content in contents))


def test_without_the_end_of_document_only_bytes_are_written(texts: Path, tmp_path: Path) -> None:
    written = convert([texts / "b.txt"], tmp_path / "data", append_eod=False)
    assert read(written.prefix) == [list("zwölf\n".encode())]


def test_files_are_found_in_a_stable_order_by_suffix_and_without_what_is_excluded(texts: Path) -> None:
    names = [file.name for file in find_files([texts], (".py", ".md"), ("test*",))]
    assert names == ["a.py", "empty.py", "c.md"]
    assert find_files([texts / "picture.png", texts / "picture.png"]) == [texts / "picture.png"]


def test_a_missing_input_and_a_folder_without_text_are_named(texts: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere: there is no such file or folder"):
        find_files([texts / "nowhere"])
    with pytest.raises(InputError, match=r"No files that end in \.rst"):
        find_files([texts], (".rst",))


def test_a_failed_conversion_leaves_nothing_behind(texts: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "out" / "data"
    with pytest.raises(InputError, match=r"gone\.txt: cannot be read"):
        convert([texts / "a.py", texts / "gone.txt"], prefix)
    with pytest.raises(InputError, match="Every file is empty"):
        convert([texts / "empty.py"], prefix)
    assert list(prefix.parent.iterdir()) == []


def test_an_earlier_dataset_survives_a_failed_conversion(texts: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "data"
    convert([texts / "a.py"], prefix)
    before = read(prefix)
    with pytest.raises(InputError):
        convert([texts / "gone.txt"], prefix)
    assert read(prefix) == before


def test_an_output_that_cannot_be_written_is_named(texts: Path) -> None:
    with pytest.raises(InputError, match=r"a\.py/data: cannot be written"):
        convert([texts / "b.txt"], texts / "a.py" / "data")


@pytest.mark.parametrize(("version", "size"), [("0.16.1", 256), ("0.17.1", 256), ("0.18.0rc1", 257), ("0.19.2", 257)])
def test_the_flags_give_257_ids_in_every_release(version: str, size: int) -> None:
    assert tokenizer_flags(version) == ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(size)]


def test_the_installed_release_agrees_on_the_number_of_ids_and_the_end_of_a_document() -> None:
    from megatron.core.package_info import __version__
    from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

    tokenizer = NullTokenizer(int(tokenizer_flags(__version__)[-1]))
    assert (tokenizer.vocab_size, tokenizer.eod) == (EOD + 1, EOD)


def test_the_command_line_converts_and_says_what_to_pass_to_megatron(texts: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "data"
    script = str(ROOT / "demo" / "text_to_indexed.py")
    command = [sys.executable, script, "--append-eod", "--exclude", "tests"]
    ended = subprocess.run(
        [*command, "--input", str(texts), "--output-prefix", str(prefix)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    first, second = ended.stdout.splitlines()
    tokens = len(b"print(1)\n") + len("zwölf\n".encode()) + 256 + 3
    assert "Delete Megatron's index" not in ended.stdout
    assert first == f"3 documents, {tokens} tokens in {prefix}.bin and .idx"
    assert second.startswith(f"--data-path {prefix} --tokenizer-type NullTokenizer --vocab-size ")
    assert all(document[-1] == EOD for document in read(prefix))


def test_replacing_a_dataset_warns_of_the_index_that_megatron_keeps(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--input", str(texts), "--output-prefix", str(tmp_path / "data")]
    assert text_to_indexed.main(arguments) == 0
    assert "Delete Megatron's index" not in capsys.readouterr().out
    assert text_to_indexed.main(arguments) == 0
    assert f"Delete Megatron's index of its samples: {tmp_path / 'cache'}" in capsys.readouterr().out


def test_the_command_line_fails_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--input", str(tmp_path / "nowhere"), "--output-prefix", str(tmp_path / "data")]
    assert text_to_indexed.main(arguments) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "nowhere: there is no such file or folder" in error
