"""Values that a training without storage reads."""

from __future__ import annotations

import pytest
import torch

from mindspeed_lite.dryrun import fake_tensors
from mindspeed_lite.ops import traced
from mindspeed_lite.ops.moe_router import cpu
from mindspeed_lite.ops.moe_router.reference import SIGMOID, Form


@pytest.mark.parametrize(("load", "counts"), [(1.0, [3, 3, 3, 3]), (2.0, [6, 2, 2, 2])])
def test_the_fused_router_spreads_tokens(monkeypatch, load, counts):
    monkeypatch.setattr(traced, "dry", True)
    monkeypatch.setattr(fake_tensors, "expert_load", load)
    with fake_tensors.StoragelessMode():
        _, chosen = cpu.moe_router(torch.empty(6, 4), None, Form(SIGMOID, 2))
        tokens = fake_tensors.known(chosen.sum(dim=0))
    assert tokens is not None and tokens.tolist() == counts


def test_places_of_known_values_are_known():
    with fake_tensors.StoragelessMode():
        places = (torch.arange(4) == 2).nonzero()
        assert places.shape == (1, 1) and int(places[0]) == 2
        assert torch.arange(4)[torch.arange(4) > 1].shape == (2,)


def test_integers_of_a_batch_are_known():
    """Megatron's multimodal model counts a batch's image tokens, and makes its layers as long."""
    batch = {"tokens": torch.tensor([[-200, 7, 9], [-200, 1, 2]]), "image": torch.ones(2, 3)}
    with fake_tensors.StoragelessMode():
        found = next(fake_tensors._HostLoader(iter([batch])))
        tokens = torch.cat([found["tokens"].view(-1), found["tokens"].view(-1)])
        assert int((tokens == -200).sum()) == 4 and torch.where(tokens != -200)[0].shape == (8,)
        assert found["image"].sum().shape == ()
