"""Which device is chosen, and what a user reads whose wish cannot be met."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch

from mindspeed_lite import platform
from mindspeed_lite.platform import DeviceError, cuda, npu
from tests.platform.forked import forked


@pytest.fixture
def no_accelerator(monkeypatch):
    """A machine without torch_npu and without a GPU, whatever this one has."""
    monkeypatch.delenv("MINDSPEED_LITE_DEVICE", raising=False)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "torch_npu" else find(name, *rest)
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_without_an_accelerator_the_cpu_is_chosen(no_accelerator):
    assert platform.choose().name == "cpu"
    assert platform.choose("auto").name == "cpu"


def test_a_gpu_is_preferred_to_the_cpu_and_left_as_it_is(no_accelerator, monkeypatch):
    monkeypatch.setattr(cuda, "available", lambda: [])
    chosen = platform.choose()
    assert (chosen.name, chosen.distributed_backend) == ("cuda", "nccl")
    redirects = platform.Redirects()
    chosen.install(redirects)
    assert not list(redirects.owners())


def test_the_variable_overrides_the_order(no_accelerator, monkeypatch):
    monkeypatch.setattr(cuda, "available", lambda: [])
    monkeypatch.setenv("MINDSPEED_LITE_DEVICE", "cpu")
    assert platform.choose().name == "cpu"
    assert platform.choose("cuda").name == "cuda", "an argument counts more than the variable"
    monkeypatch.setenv("MINDSPEED_LITE_DEVICE", "")
    assert platform.choose().name == "cuda", "an empty variable is an unset one"


def test_an_unknown_device_names_the_variable_and_the_choice(no_accelerator, monkeypatch):
    monkeypatch.setenv("MINDSPEED_LITE_DEVICE", "gpu")
    with pytest.raises(DeviceError) as caught:
        platform.choose()
    text = str(caught.value)
    assert "MINDSPEED_LITE_DEVICE" in text and "'gpu'" in text
    assert all(name in text for name in ("auto", "npu", "cuda", "cpu"))


def test_npu_without_torch_npu_says_what_to_install(no_accelerator):
    with pytest.raises(DeviceError, match=r"'npu' .*torch_npu is not installed \(pip install"):
        platform.choose("npu")


def test_cuda_without_a_gpu_says_where_to_look(no_accelerator):
    with pytest.raises(DeviceError, match=r"'cuda' .*(CUDA_VISIBLE_DEVICES|built without CUDA)"):
        platform.choose("cuda")


@pytest.mark.parametrize("name", ["npu", "cuda"])
def test_a_device_asked_for_by_the_variable_names_the_variable(no_accelerator, monkeypatch, name):
    monkeypatch.setenv("MINDSPEED_LITE_DEVICE", name)
    with pytest.raises(DeviceError, match="MINDSPEED_LITE_DEVICE"):
        platform.choose()


def test_a_broken_torch_npu_is_a_reason_and_not_a_silence(tmp_path, monkeypatch):
    (tmp_path / "torch_npu.py").write_text("raise OSError('libascendcl.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    importlib.invalidate_caches()
    (reason,) = npu.available()
    assert "libascendcl.so" in reason and "set_env.sh" in reason


@forked()
def test_activating_again_is_no_change_and_another_device_is_an_error():
    first = platform.activate()
    installed = torch.cuda.is_available
    assert platform.activate() is first is platform.current()
    assert platform.activate("cpu") is first and platform.activate("auto") is first
    assert torch.cuda.is_available is installed
    with pytest.raises(DeviceError, match="cuda was asked for but cpu is already active"):
        platform.activate("cuda")
    assert platform.current() is first
    platform.deactivate()
    platform.deactivate()
    assert platform.current() is None
    assert platform.activate() is first, "it can be put in place again"


@forked(MINDSPEED_LITE_DEVICE="tpu")
def test_a_wrong_wish_fails_the_adaptor_line_and_changes_nothing():
    before = dict(vars(torch.cuda))
    with pytest.raises(DeviceError, match="tpu"):
        import mindspeed_lite.megatron_adaptor  # noqa: F401
    assert platform.current() is None
    assert all(vars(torch.cuda)[name] is value for name, value in before.items())


@forked()
def test_a_device_that_fails_halfway_is_taken_back():
    from mindspeed_lite.platform import cpu

    own = torch.cuda.is_available

    def fail(redirects, host):
        raise RuntimeError("halfway")

    cpu._redirect_random = fail
    with pytest.raises(RuntimeError, match="halfway"):
        platform.activate()
    assert torch.cuda.is_available is own and platform.current() is None
