"""Norms of torch under the device layer, and a feature that does not apply. `_shared/test_local_norms.py` has more."""

from __future__ import annotations

import pytest
import torch

from mindspeed_lite import platform
from tests.harness.norms import HIDDEN, config_of, norm_of
from tests.harness.processes import forked


@forked("megatron")
def test_the_device_layer_alone_marks_torchs_norms_as_well():

    with pytest.raises(AssertionError, match="sequence parallel"):
        norm_of(sequence_parallel=True, tensor_model_parallel_size=2)
    platform.activate()
    for normalization, kind in (("RMSNorm", torch.nn.RMSNorm), ("LayerNorm", torch.nn.LayerNorm)):
        config = config_of(normalization=normalization, sequence_parallel=True, tensor_model_parallel_size=2)
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

        norm = WrappedTorchNorm(config, HIDDEN, 1e-5)
        assert type(norm) is kind and all(each.sequence_parallel for each in norm.parameters())
        assert config.sequence_parallel is True, "the configuration is the user's"
        assert not hasattr(norm_of(normalization=normalization).weight, "sequence_parallel")
