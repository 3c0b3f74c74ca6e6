"""Reasons of Megatron arguments that a feature cannot work with."""

import pytest

from mindspeed_lite.engine import Context, Settings
from mindspeed_lite.patches._shared.conflicts import conflict_reasons, fsdp_reasons

TABLE = {"fp8": "other outputs", "cuda_graph_impl": "recorded once", "cpu_offloading": "moved away"}


@pytest.mark.parametrize(
    "given, reasons",
    [
        ({}, []),
        ({"fp8": None, "cuda_graph_impl": "none", "cpu_offloading": False}, []),
        ({"fp8": "e4m3", "cuda_graph_impl": "local"}, ["other outputs", "recorded once"]),
        ({"cpu_offloading": True, "unknown": True}, ["moved away"]),
    ],
)
def test_only_what_is_set_gives_its_reason(given, reasons):
    assert conflict_reasons(TABLE, given.get) == reasons


def test_each_flag_of_fsdp_is_named():
    args = {"use_megatron_fsdp": True, "use_custom_fsdp": True, "use_torch_fsdp2": False}
    found = fsdp_reasons(Context(Settings({}), "cpu", {}, args), "gathers by itself")
    assert found == ["--use-megatron-fsdp gathers by itself", "--use-custom-fsdp gathers by itself"]
