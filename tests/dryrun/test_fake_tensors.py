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


def test_shapes_found_directly_are_those_of_torchs_fake_tensors(monkeypatch):
    def found(is_direct):
        if not is_direct:
            monkeypatch.setattr(fake_tensors, "_is_direct", lambda func: False)
        with fake_tensors.StoragelessMode() as mode, torch.no_grad():
            x, y = torch.empty(4, 6, dtype=torch.bfloat16), torch.empty(6, 4)
            own = x.detach()
            results = [
                x.view(2, 12), x[1:3, ::2], x.as_strided((2, 2), (3, 1), 1), x.expand(3, 4, 6), x.t(), x.unsqueeze(1),
                *x.split(3, dim=1), *x.split([1, 5], dim=1), torch.cat([x, y.t()], 1), y @ y.t(), x.mul(y.t()),
                x.add(1, alpha=2), x > 0, y.clone(), x.t().clone(), own.mul_(2), own.copy_(y.t()),
                torch.where(x > 0, x, 1.0), torch.nn.functional.pad(x, (0, 1)), torch.nn.functional.silu(x),
            ]  # fmt: skip
            assert {each.fake_mode for each in results} == {mode}
            return [
                (each.shape, each.stride(), each.dtype, each.device, each.storage_offset(),
                 each.untyped_storage()._cdata == x.untyped_storage()._cdata) for each in results
            ]  # fmt: skip

    assert found(True) == found(False)
