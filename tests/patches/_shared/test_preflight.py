"""What stops a training before it starts, and what does not."""

import pytest

from mindspeed_lite.engine import OptionError
from mindspeed_lite.patches._shared.preflight import check


@pytest.fixture
def data(tmp_path):
    for name in ("text.idx", "text.bin", "half.idx"):
        (tmp_path / name).write_text("")
    (tmp_path / "energon").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"data_path": None, "context_parallel_size": 1, "world_size": 1},
        {"data_path": ["text"]},
        {"data_path": ["0.3", "text", "7e-1", "text"]},
        {"data_path": ["energon"]},
        {"data_path": ["s3://bucket/text"], "data_args_path": "msc://bucket/list"},
        {"data_path": ["none"], "mock_data": True},
        {"context_parallel_size": 2, "tensor_model_parallel_size": 2, "world_size": 8},
        {"pipeline_model_parallel_size": 2},
    ],
)
def test_what_megatron_may_go_on_with(data, monkeypatch, arguments):
    monkeypatch.chdir(data)
    check(arguments)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"data_path": ["none"]}, r"--data-path none: there is no none.idx and no none.bin"),
        ({"data_path": ["0.5", "text", "0.5", "half"]}, r"--data-path half: there is no half.bin"),
        ({"valid_data_path": ["none"]}, r"--valid-data-path none"),
        ({"per_split_data_args_path": "none"}, r"--per-split-data-args-path none: there is no such file"),
        (
            {"context_parallel_size": 4, "tensor_model_parallel_size": 2, "world_size": 12},
            r"--tensor-model-parallel-size 2 --context-parallel-size 4: needs 8 processes, .* has 12\. .*per-node 8",
        ),
        ({"context_parallel_size": 0, "world_size": 2}, r"--context-parallel-size 0: must be at least 1\."),
        ({"tensor_model_parallel_size": -1}, r"--tensor-model-parallel-size -1: must be at least 1\."),
    ],
)
def test_what_it_would_end_in_a_traceback_with(data, monkeypatch, arguments, text):
    monkeypatch.chdir(data)
    with pytest.raises(OptionError, match=text):
        check(arguments)


def test_a_rank_that_reads_no_data_need_not_have_it(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    check({"data_path": ["none"]})
