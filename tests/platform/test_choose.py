"""Which device is chosen, and what a user reads whose wish cannot be met."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch

from mindspeed_lite import platform
from mindspeed_lite.platform import DeviceError, cuda, npu, npu_trouble
from mindspeed_lite.platform.redirect import Redirects
from tests.harness import fake_torch_npu
from tests.harness.processes import forked


@pytest.fixture
def no_accelerator(monkeypatch):
    """A machine without torch_npu and without a GPU, whatever this one has."""
    monkeypatch.delenv("MINDSPEED_LITE_DEVICE", raising=False)
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "torch_npu" else find(name, *rest)
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("npu", r"'npu' .*torch_npu is not installed \(pip install"),
        ("cuda", r"'cuda' .*(CUDA_VISIBLE_DEVICES|built without CUDA)"),
    ],
)
def test_an_absent_device_says_what_to_do(no_accelerator, monkeypatch, name, words):
    assert platform.choose("auto").name == "cpu"
    with pytest.raises(DeviceError, match=words):
        platform.choose(name)
    monkeypatch.setenv("MINDSPEED_LITE_DEVICE", name)
    with pytest.raises(DeviceError, match=f"MINDSPEED_LITE_DEVICE={words}"):
        platform.choose()


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


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """`machine(body)`: one with such a torch_npu and no NPU, nothing of CANN's in its environment; its /dev."""
    for name in ("MINDSPEED_LITE_DEVICE", "ASCEND_HOME_PATH", "ASCEND_RT_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(npu_trouble, "_SET_ENV", ())
    devices = tmp_path / "dev"
    devices.mkdir()
    monkeypatch.setattr(npu_trouble, "DEVICE_NODES", devices)
    monkeypatch.setattr(torch, "npu", None, raising=False)
    monkeypatch.setattr(torch.distributed, "is_hccl_available", None, raising=False)
    own = set(sys.modules)

    def make(body, **keywords):
        monkeypatch.syspath_prepend(fake_torch_npu.torch_npu(tmp_path / "site", body, **keywords))
        importlib.invalidate_caches()
        return devices

    yield make
    for name in set(sys.modules) - own:
        if name.partition(".")[0] == "torch_npu":
            del sys.modules[name]


SHARED = ("davinci_manager", "devmm_svm", "hisi_hdc")


def the_reason(monkeypatch, *words):
    """The one reason in one line, the same for whoever asks; every word is in it, and a remedy in parentheses."""
    (reason,) = npu.available()
    assert all(word in reason for word in words), reason
    assert "\n" not in reason and reason.endswith(")") and "(" in reason
    monkeypatch.setenv("MINDSPEED_LITE_DEVICE", "npu")
    with pytest.raises(DeviceError) as caught:
        platform.choose()
    assert str(caught.value) == f"MINDSPEED_LITE_DEVICE='npu' cannot be used: {reason}"
    return reason


def test_a_set_env_that_is_there_is_the_one_to_source(machine, monkeypatch, tmp_path):
    machine(fake_torch_npu.NO_LIBRARY.format(library="libhccl.so"))
    script = tmp_path / "set_env.sh"
    script.touch()
    monkeypatch.setattr(npu_trouble, "_SET_ENV", (str(tmp_path / "other.sh"), str(script)))
    the_reason(monkeypatch, f"(source {script})")


def test_a_cann_without_the_library_is_named(machine, monkeypatch, tmp_path):
    machine(fake_torch_npu.NO_LIBRARY.format(library="libhccl.so"))
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    the_reason(monkeypatch, f"nor is it below ASCEND_HOME_PATH={tmp_path}", "whole CANN toolkit")
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libhccl.so").touch()
    (reason,) = npu.available()
    assert "is there but not found" in reason and "LD_LIBRARY_PATH" in reason


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("libascend_hal.so: cannot open shared object file", ("the Ascend driver's libascend_hal.so", "install the")),
        ("libatb.so: cannot open shared object file", ("CANN's libatb.so", "NNAL")),
        ("libge_runner.so: cannot open shared object file", ("libge_runner.so is not found and ASCEND_HOME_PATH",)),
        ("/x/libtorch_npu.so: undefined symbol: _ZN3c1010SmallVec", ("does not fit torch", "exactly this torch")),
        ("/x/libtorch_npu.so: undefined symbol: aclrtNewThing", ("libtorch_npu.so lacks aclrtNewThing", "CANN")),
        ("something else\n[ERROR] 2026-01-01 (PID:1)", ("ImportError: something else (", "reinstall torch_npu")),
    ],
)
def test_what_else_can_be_missing(machine, monkeypatch, message, words):
    machine(f"raise ImportError({message!r})")
    assert "PID" not in the_reason(monkeypatch, *words)


def test_a_wrong_pair_is_told_before_anything_of_it_is_run(machine, monkeypatch):
    machine("raise SystemError('it was run')", version="2.1.0.post8")
    series = ".".join(fake_torch_npu.TORCH.split(".")[:2])
    the_reason(
        monkeypatch, f"torch_npu 2.1.0.post8 is not for torch {fake_torch_npu.TORCH}", f"'torch-npu=={series}.*'"
    )


@pytest.mark.parametrize(
    ("nodes", "visible", "words"),
    [
        ((), None, ("there is no {dev}/davinci*", "npu-smi info", "--device /dev/davinci0", *SHARED)),
        (("davinci0", "davinci_manager"), None, ("{dev}/devmm_svm, {dev}/hisi_hdc not", "--device")),
        (("davinci0", "davinci1", *SHARED), "7", ("ASCEND_RT_VISIBLE_DEVICES='7' leaves none of 2", "0 to 1")),
        (("davinci0", *SHARED), None, ("although {dev}/davinci0 can be opened", "driver and CANN do not fit")),
    ],
)
def test_device_nodes(machine, monkeypatch, nodes, visible, words):
    devices = machine(fake_torch_npu.NO_DEVICE)
    for name in nodes:
        (devices / name).touch()
    if visible:
        monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", visible)
    the_reason(monkeypatch, *(word.format(dev=devices) for word in words))


def test_without_permission(machine, monkeypatch):
    devices = machine(fake_torch_npu.NO_DEVICE)
    for name in ("davinci0", "davinci1", *SHARED):
        (devices / name).touch()
    closed = devices / "davinci1"
    monkeypatch.setattr(npu_trouble.os, "access", lambda path, mode: path != closed)
    the_reason(monkeypatch, f"no permission to open {closed}", f"usermod -aG {closed.group()} USER")


def test_with_a_device_it_is_chosen_first(machine):
    machine(fake_torch_npu.WORKS)
    assert npu.available() == [] and npu.trouble() is None
    chosen = platform.choose()
    assert chosen.name == "npu" and chosen.describe() == "2 x Ascend910B2"


def test_another_device_is_never_taken_silently_beside_an_unusable_npu(machine, monkeypatch, caplog):
    machine(fake_torch_npu.NO_DEVICE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (reason,) = npu.available()
    assert platform.choose().name == "cpu"
    (said,) = caplog.records
    assert said.levelname == "WARNING" and said.getMessage() == f"cpu is used, because {reason}"
    caplog.clear()
    monkeypatch.setenv("MINDSPEED_LITE_DEVICE", "cpu")
    assert platform.choose().name == "cpu" and not caplog.records, "who asks for it need not be told"


def test_a_mapping_that_does_not_import_is_a_device_error(machine):
    machine(fake_torch_npu.WORKS, transfer="raise ImportError('no such name')")
    with pytest.raises(DeviceError, match=r"transfer_to_npu does not import \(no such name\); install the torch_npu"):
        npu.install(Redirects())


@pytest.mark.parametrize(
    ("file", "text", "version"),
    [
        ("aarch64-linux/ascend_toolkit_install.info", "package_name=x\nversion=8.5.0\ninnerversion=V100\n", "8.5.0"),
        ("version.cfg", "runtime_running_version=[7.0.0.1.0:8.0.RC1]\n", "8.0.RC1"),
        ("x86_64-linux/ascend_toolkit_install.info", "nothing of it", ""),
    ],
)
def test_the_version_of_cann(tmp_path, monkeypatch, file, text, version):
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    assert npu_trouble.cann_version() == ""
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert npu_trouble.cann_version() == version


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


@pytest.mark.parametrize(("name", "value"), [("RANK", "x"), ("WORLD_SIZE", "2.0"), ("LOCAL_WORLD_SIZE", "")])
def test_a_launchers_variable_that_is_no_number_is_named(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(DeviceError, match=f"^{name}='{value}' is not a number: .*torchrun"):
        platform.activate()
    assert platform.current() is None


@forked()
def test_a_device_that_fails_halfway_is_taken_back():
    from mindspeed_lite.platform import cpu

    own = torch.cuda.is_available

    def fail(redirects):
        raise RuntimeError("halfway")

    cpu._redirect_random = fail
    with pytest.raises(RuntimeError, match="halfway"):
        platform.activate()
    assert torch.cuda.is_available is own and platform.current() is None
