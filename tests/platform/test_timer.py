"""A device is idle before and after what is timed."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from mindspeed_lite.platform.timer import seconds_of


def test_the_device_is_waited_for_before_and_after(monkeypatch):
    calls = []
    module = SimpleNamespace(synchronize=lambda device: calls.append(device.type))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert seconds_of(lambda: calls.append("run"), torch.device("cuda")) >= 0
    assert calls == ["cuda", "run", "cuda"]
    assert seconds_of(lambda: calls.append("here"), torch.device("cpu")) >= 0 and calls[-1] == "here"
