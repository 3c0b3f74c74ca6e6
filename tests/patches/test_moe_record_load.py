"""`--moe-record-load`: what is refused before training, what is left out, and that nothing stays."""

from __future__ import annotations

import types
from pathlib import Path
from unittest import mock

import pytest
import torch

import mindspeed_lite
from mindspeed_lite import runtime
from mindspeed_lite.engine import Context, OptionError, Settings
from mindspeed_lite.parallel.balance import record
from mindspeed_lite.patches import moe_record_load as patch
from tests.harness.process_groups import start
from tests.harness.processes import forked, on_ranks


def reasons(file, interval=10, **args):
    settings = Settings({patch.NAME: str(file), patch.INTERVAL: interval})
    return list(patch.FEATURE.condition(Context(settings, "cpu", {}, {"num_experts": 4, **args})))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (".", "cannot be written there"),
        ("no/load", "in a folder that exists"),
        ("/dev/full/load", "cannot"),
        ("other", "else"),
    ],
)
def test_a_file_that_cannot_be_the_record_is_one_line_before_training(tmp_path, monkeypatch, name, why):
    monkeypatch.chdir(tmp_path)
    Path("other").write_text("weights\n")
    with pytest.raises(OptionError, match=f"^--moe-record-load {name}: .*{why}.*\\.$"):
        reasons(name)
    assert Path("other").read_text() == "weights\n"
    # Rank 0 alone writes: another node need not have the folder.
    monkeypatch.setenv("RANK", "1")
    assert reasons(name) == []


def router(**fields):
    """A router of 4 experts, 2 for a token, with weights by which every expert is chosen."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe.router import TopKRouter

    shape = {"num_layers": 3, "hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 8, "num_moe_experts": 4}
    shape |= {"moe_router_topk": 2, "moe_router_load_balancing_type": "none", "add_bias_linear": False}
    config = TransformerConfig(**{**shape, **fields})
    made = TopKRouter(config, pg_collection=ProcessGroupCollection.use_mpu_process_groups())
    made.set_layer_number(2)
    return made


def end_step(made):
    """What every schedule calls at the end of a step, with a layer for the model."""
    found = runtime.current()
    assert found is not None
    found.session.find(patch.NAME).end_step([made])


def on(file, interval=1, **more):
    return mindspeed_lite.enabled(moe_record_load=str(file), moe_record_load_interval=interval, **more)


@forked("megatron")
def test_evaluation_and_a_pass_without_a_graph_do_not_count(tmp_path):
    start()
    with on(tmp_path / "load", strict=True):
        made, x = router(), torch.randn(6, 1, 8)
        made(x)
        with torch.no_grad():
            made(x)
        made.eval()(x)
        made.train()(x)
        end_step(made)
    read = record.read(tmp_path / "load")
    assert read.header.layers == (2,) and len(read.steps) == 1
    assert read.steps[0].tokens == [12] and sum(read.steps[0].experts[0]) == 24


@forked("megatron")
def test_a_layer_of_multi_token_prediction_stands_behind_the_others(tmp_path):
    start()
    with on(tmp_path / "load", strict=True):
        made = router(mtp_num_layers=2)
        # As from 0.17 on; 0.16 numbers them so itself.
        made.is_mtp_layer = True
        made(torch.randn(6, 1, 8))
        end_step(made)
    read = record.read(tmp_path / "load")
    assert read.header.layers == (5,) and read.label(5) == "mtp 2"


@pytest.mark.parametrize("sequence_parallel", [False, True])
@forked("megatron")
def test_tokens_that_a_tensor_parallel_group_shares_count_once(tmp_path, sequence_parallel):
    def body(rank):
        start(2, rank, tp=2, store=torch.distributed.FileStore(str(tmp_path / "store"), 2))
        with on(tmp_path / "load", strict=True):
            made = router(tensor_model_parallel_size=2, sequence_parallel=sequence_parallel)
            made(torch.randn(6, 1, 8))
            end_step(made)

    on_ranks(2, body)
    assert record.read(tmp_path / "load").steps[0].tokens == [12 if sequence_parallel else 6]


@forked("megatron")
def test_what_cannot_be_counted_is_a_reason_and_training_goes_on(tmp_path):
    start()
    with on(tmp_path / "load"):
        made, other = router(), router(num_moe_experts=2)
        x = torch.randn(6, 1, 8)
        made(x)
        other(x)
        made.set_layer_number(7)
        made(x)
        dense = types.SimpleNamespace(config=types.SimpleNamespace(num_moe_experts=None), parameters=made.parameters)
        end_step(dense)
        (tmp_path / "load").mkdir()
        end_step(made)
        reasons = [each.reason for each in mindspeed_lite.report().fallbacks]
    assert len(reasons) == 4
    for words in ("second model", "number 7", "without experts", "cannot be written: Is a directory"):
        assert any(words in each for each in reasons), words


@forked("megatron")
def test_steps_that_no_message_has_read_are_named_at_the_end(tmp_path):
    start()
    with mock.patch("mindspeed_lite.engine.session._log") as log, on(tmp_path / "load", 2):
        made = router()
        for _ in range(3):
            made(torch.randn(6, 1, 8))
            end_step(made)
    assert [each.step for each in record.read(tmp_path / "load").steps] == [1, 2]
    (said,) = log.warning.call_args_list
    assert "the last steps, 1, are not in" in said.args[1]
