"""`--use-ascend-coc` in real Megatron: which layers talk in chunks, what stays whole, and how flags meet."""

from __future__ import annotations

import pytest
import torch

import mindspeed_lite
from mindspeed_lite.engine import Settings
from mindspeed_lite.parallel import symmetric
from mindspeed_lite.patches import use_ascend_coc as patch
from tests.harness.fused_collectives import symmetric_memory_operators
from tests.harness.processes import forked
from tests.patches.linear_layers import HIDDEN, ON, config_of, layer_of, messages, on_tensor_ranks, passes, same

FEATURE = patch.FEATURE


@pytest.mark.parametrize("sequence_parallel", [True, False])
@forked("megatron")
def test_layers_give_what_megatrons_give(sequence_parallel):
    def body(rank):
        config = config_of(False, tensor_model_parallel_size=2, sequence_parallel=sequence_parallel)
        rows = 5 if sequence_parallel else 10
        generator = torch.Generator().manual_seed(rank * sequence_parallel)
        wide = torch.randn(rows, 2, HIDDEN, generator=generator).bfloat16()
        narrow = torch.randn(10, 2, 12, generator=torch.Generator().manual_seed(rank)).bfloat16()
        for kind, x, fields in (
            ("column", wide, {}),
            ("column", wide, {"skip_bias_add": True}),
            ("column", wide, {"bias": False, "gather_output": True}),
            ("row", narrow, {}),
            ("row", narrow, {"skip_bias_add": True}),
            ("row", narrow, {"bias": False}),
        ):
            if sequence_parallel and fields.get("gather_output"):
                continue  # Megatron refuses it
            layer = layer_of(kind, config, **fields)
            for frozen in (False, True):
                off = passes(layer, x, frozen)
                with mindspeed_lite.enabled(**ON):
                    on, sent = messages(lambda layer=layer, x=x, frozen=frozen: passes(layer, x, frozen))
                    assert len(sent) >= 2, (kind, fields)
                same(on, off)

    on_tensor_ranks(2, body)


@forked("megatron")
def test_what_stays_in_one_piece():
    def body(rank):
        x = torch.randn(6, 1, HIDDEN).bfloat16()

        def sent_by(name="fc1", flags=ON, training=True, **fields):
            config = config_of(False, tensor_model_parallel_size=2, sequence_parallel=True)
            for field, value in fields.items():
                setattr(config, field, value)
            with mindspeed_lite.enabled(**flags):
                layer = layer_of("column", config, tp_comm_buffer_name=name).train(training)
                with torch.no_grad():
                    return messages(lambda: layer(x))[1], mindspeed_lite.report()

        assert len(sent_by()[0]) == 2
        assert len(sent_by(flags={**ON, "coc_mode": 1})[0]) == 1
        assert len(sent_by(tp_comm_overlap_disable_fc1=True)[0]) == 1
        assert len(sent_by("fc2", tp_comm_overlap_disable_fc1=True)[0]) == 2
        assert len(sent_by(tp_comm_overlap_ag=False)[0]) == 1
        assert len(sent_by(tp_comm_overlap_rs=False)[0]) == 2
        automatic = {"use_ascend_coc": True, "strict": True}
        # Six rows are too few for a trial, and an evaluation never tries.
        assert len(sent_by(flags=automatic)[0]) == len(sent_by(flags=automatic, training=False)[0]) == 1
        torch.use_deterministic_algorithms(True)
        sent, report = sent_by(flags=automatic)
        torch.use_deterministic_algorithms(False)
        assert len(sent) == 4 and any("times of a trial differ" in each for each in report.notices)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            sent, report = sent_by(flags={**ON, "strict": False})
        assert sent == [] and [each.reason for each in report.fallbacks] == ["autocast is on"]

    on_tensor_ranks(2, body)


@forked("megatron")
def test_fused_kernels_serve_megatrons_sequence_parallel_layers():
    """With PyTorch's fallbacks of its operators in their place: what reaches them, and the same bits."""

    def body(rank):
        library, calls = symmetric_memory_operators()
        # The plan and the group would say that this is a CPU.
        object.__setattr__(FEATURE, "condition", None)
        symmetric._alone = lambda device: None
        for sequence_parallel, expected in ((True, ["gather", "scatter"] * 2), (False, [])):
            config = config_of(False, tensor_model_parallel_size=2, sequence_parallel=sequence_parallel)
            layers = [layer_of(kind, config, bias=False, skip_bias_add=True) for kind in ("column", "row")]

            def step(layers=layers):
                for layer in layers:
                    layer.zero_grad()
                x = torch.full((4, 1, HIDDEN), 0.5 + rank).bfloat16().requires_grad_()
                y = x
                for layer in layers:
                    y = layer(y)[0]
                y.sum().backward()
                return y.detach(), x.grad, *(layer.weight.grad for layer in layers)

            off = step()
            calls.clear()
            flags = {"coc_fused_kernel": True, "coc_parallel_num": 2, "strict": sequence_parallel}
            with mindspeed_lite.enabled(**flags):
                on = step()
                said = [text for text in map(str, mindspeed_lite.report().fallbacks) if "not sequence parallel" in text]
            assert len(said) == (not sequence_parallel)
            assert all(map(torch.equal, on, off)) and [call[0] for call in calls] == expected
        library._destroy()

    on_tensor_ranks(2, body)


def test_megatrons_own_flag_turns_it_on():
    assert FEATURE.is_enabled(Settings.of(FEATURE.options, {"tp_comm_overlap": True}))
    assert not FEATURE.is_enabled(Settings.of(FEATURE.options, {"coc_mode": 1}))
