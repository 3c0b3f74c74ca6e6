"""Features in force and out again: nesting, the whole of Megatron as it was, and when the import line may stand."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import json
import os
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest

import mindspeed_lite
from mindspeed_lite import activation, platform
from mindspeed_lite.engine import OptionError, PlanError, UndoError
from tests import matrix
from tests.platform.forked import ROOT, clean_environment, forked

BOTH = {"use_fused_rmsnorm": True, "use_flash_attn": True}


def targets():
    """The two attributes that the features of this release swap, raw."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    return vars(WrappedTorchNorm)["__new__"], vars(DotProductAttention)["forward"]


def status(feature, report=None):
    report = report or mindspeed_lite.report()
    return next(entry.status for entry in report.entries if entry.feature == feature)


def places():
    """Every attribute of every loaded Megatron module and of the classes defined there."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "megatron" or not isinstance(module, types.ModuleType):
            continue
        for key, value in list(vars(module).items()):
            if key == "__warningregistry__":
                continue
            found[f"{name}:{key}"] = value
            if isinstance(value, type) and value.__module__ == name:
                found |= {f"{name}:{value.__qualname__}.{each}": raw for each, raw in list(vars(value).items())}
    return found


def changed(before, after):
    return {place for place in before.keys() | after.keys() if before.get(place) is not after.get(place)}


@forked("megatron")
def test_sets_of_features_nest_and_the_latest_is_taken_back_first():
    platform.activate()
    original = targets()
    first = mindspeed_lite.enable(use_fused_rmsnorm=True)
    assert status("use_fused_rmsnorm", first) == "applied" and status("use_flash_attn", first) == "off"
    norm, _ = outer = targets()
    with mindspeed_lite.enabled(use_flash_attn=True) as second:
        assert status("use_flash_attn", second) == status("use_flash_attn") == "applied"
        assert targets()[0] is norm and targets()[1] is not outer[1]
        with mindspeed_lite.enabled(use_fused_rmsnorm=True):
            assert targets()[0] is not norm, "the same feature again, on top"
        assert targets()[0] is norm
    assert targets() == outer and status("use_fused_rmsnorm") == "applied"
    mindspeed_lite.enable(use_flash_attn=True)
    assert mindspeed_lite.disable() == [] and mindspeed_lite.report() is None
    assert targets()[1] is original[1] and platform.current() is None
    assert mindspeed_lite.disable() == [], "again is no change"


@forked("megatron")
def test_a_block_that_raises_takes_its_features_back():
    original = targets()
    with pytest.raises(KeyError, match="inside"), mindspeed_lite.enabled(**BOTH):
        raise KeyError("inside")
    assert targets() == original and platform.current() is None and mindspeed_lite.report() is None


@forked("megatron")
def test_leaving_blocks_in_the_wrong_order_is_refused_and_changes_nothing():
    platform.activate()
    outer = mindspeed_lite.enabled(use_fused_rmsnorm=True)
    outer.__enter__()
    inner = mindspeed_lite.enabled(use_fused_rmsnorm=True)
    inner.__enter__()
    now = targets()
    with pytest.raises(UndoError, match="reverse order"):
        outer.__exit__(None, None, None)
    assert targets() == now
    inner.__exit__(None, None, None)


@forked("megatron")
def test_the_report_is_a_copy_and_none_when_nothing_is_in_force():
    assert mindspeed_lite.report() is None
    mindspeed_lite.enable(use_fused_rmsnorm=True)
    report = mindspeed_lite.report()
    report.entries.clear()
    report.notices.append("not mine")
    assert status("use_fused_rmsnorm") == "applied" and mindspeed_lite.report().notices == []
    text = mindspeed_lite.report().to_text()
    assert "use_fused_rmsnorm" in text and "device_sequence_parallel_norm" in text
    versions = mindspeed_lite.report().versions
    assert set(versions) == {"mindspeed_lite", "torch", "megatron-core", "python"}
    assert versions["mindspeed_lite"] == mindspeed_lite.__version__


@pytest.mark.parametrize(
    ("keyword", "hint"),
    [
        ("use_fused_rms_norm", "did you mean use_fused_rmsnorm"),
        ("strikt", "did you mean strict"),
        ("flash", "use_flash_attn"),
        ("xyz", "there are .*use_fused_rmsnorm"),
    ],
)
def test_an_unknown_keyword_is_an_error_with_a_hint(keyword, hint):
    for call in (mindspeed_lite.enable, mindspeed_lite.enabled):
        with pytest.raises(OptionError, match=f"no option '{keyword}'.*{hint}"):
            entered = call(**{keyword: True})
            entered.__enter__()
    assert platform.current() is None and mindspeed_lite.report() is None


def test_general_flags_go_with_and_without_their_prefix():
    for name in ("auto", "strict", "report", "allow_unverified"):
        assert activation.dest_of(name) == activation.dest_of(f"mindspeed_lite_{name}") == f"mindspeed_lite_{name}"


@forked("megatron")
def test_a_wrong_value_is_refused():
    platform.activate()
    original = targets()
    with pytest.raises(OptionError, match="--use-flash-attn is a switch"):
        mindspeed_lite.enable(use_flash_attn="yes")
    assert targets() == original and mindspeed_lite.report() is None


@pytest.mark.parametrize("call", ["enable", "enabled"])
@forked("megatron")
def test_a_refusal_leaves_no_device_layer_behind(call):
    with pytest.raises(OptionError):
        if call == "enable":
            mindspeed_lite.enable(use_flash_attn="yes")
        else:
            mindspeed_lite.enabled(use_flash_attn="yes").__enter__()
    assert platform.current() is None


@forked("torch")
def test_without_megatron_the_error_says_how_to_get_it():
    import importlib.util

    find = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *rest: None if name == "megatron" else find(name, *rest)
    with pytest.raises(PlanError, match=r"pip install megatron-core.*PYTHONPATH"):
        mindspeed_lite.enable(use_fused_rmsnorm=True)


@forked("megatron")
def test_auto_takes_what_applies_and_notes_the_rest():
    report = mindspeed_lite.enable(auto=True)
    assert status("use_fused_rmsnorm", report) == status("use_flash_attn", report) == "applied"
    left_off = {each.split()[2] for each in report.notices if each.startswith("auto leaves")}
    by_name = {"use_fused_linear_cross_entropy", "recompute_activation_function", "recompute_norm"}
    assert left_off == {
        *by_name,
        "moe_tp_extend_ep",
        "moe_wgrad_side_stream",
        "quant_states",
        "swap_attention",
        "swap_optimizer",
        "use_ascend_coc",
        "use_ascend_mc2",
        "virtual_optimizer",
    }
    mindspeed_lite.disable()
    report = mindspeed_lite.enable(auto=True, host_args={"context_parallel_size": 2}, strict=True)
    assert status("use_fused_rmsnorm", report) == "applied" and status("use_flash_attn", report) == "off"
    (notice,) = (each for each in report.notices if "use_flash_attn" in each)
    assert notice.startswith("auto leaves use_flash_attn off: --context-parallel-size is above 1")


@forked("megatron")
def test_arguments_of_the_host_may_be_a_mapping_or_an_object():
    for host_args in ({"normalization": "LayerNorm"}, types.SimpleNamespace(normalization="LayerNorm")):
        with mindspeed_lite.enabled(host_args=host_args, use_fused_rmsnorm=True) as report:
            assert status("use_fused_rmsnorm", report) == "skipped"


def depth(function):
    """How many wrappers stand around a function."""
    count, function = 0, getattr(function, "__func__", function)
    while hasattr(function, "__wrapped__"):
        count, function = count + 1, function.__wrapped__
    return count


def resident_kilobytes():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


@pytest.mark.parametrize("rounds", matrix.only([60], [60, 1000]))
@forked("megatron")
def test_many_times_on_and_off_leave_megatron_and_the_memory_as_they_were(rounds):
    """A round takes 50 ms: each searches every loaded module, twice, for holders of the swapped."""
    everything = places()
    mindspeed_lite.enable(**BOTH)
    mindspeed_lite.disable()
    assert changed(everything, places()) == set()
    # The device layer stays for the many rounds, so that they are rounds of the features.
    platform.activate()
    with_device, kept, blocks, resident = places(), targets(), 0, 0
    for index in range(rounds):
        if index == 50:
            gc.collect()
            blocks, resident = sys.getallocatedblocks(), resident_kilobytes()
        report = mindspeed_lite.enable(**BOTH) if index == rounds // 2 else None
        with contextlib.nullcontext() if report else mindspeed_lite.enabled(**BOTH):
            if index % 100 == 0:
                assert [depth(each) for each in targets()] == [2, 1], "device layer and feature; feature"
                assert changed(with_device, places()) == {
                    "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
                    "megatron.core.transformer.dot_product_attention:DotProductAttention.__init__",
                    "megatron.core.transformer.dot_product_attention:DotProductAttention.forward",
                }
        if report:
            activation.deactivate()
        assert targets() == kept
    gc.collect()
    assert sys.getallocatedblocks() - blocks < 1000, "a round makes thousands; one object kept by each is 950"
    assert resident_kilobytes() - resident < 2048
    assert changed(with_device, places()) == set()
    assert mindspeed_lite.disable() == []
    assert changed(everything, places()) == set()


PLAIN = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 2 --lr 1e-3 --train-iters 3 --bf16 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 255 --normalization RMSNorm"
)


@forked("megatron")
def test_without_a_flag_only_the_argument_hooks_and_the_device_layer_differ():
    import torch
    from packaging.specifiers import SpecifierSet

    from mindspeed_lite.platform import megatron

    hooks = {
        f"megatron.training.arguments:{name}" for name in ("add_megatron_arguments", "parse_args", "validate_args")
    }
    hooks.add("megatron.training.yaml_arguments:validate_yaml")
    of_device = {
        patch.target
        for feature in megatron.ASSUMPTIONS
        for patch in feature.patches
        if megatron.version() in SpecifierSet(patch.versions)
    }
    before, of_torch = places(), [dict(vars(each)) for each in (torch, torch.cuda, torch.distributed)]
    from megatron.training import arguments

    import mindspeed_lite.megatron_adaptor

    sys.argv = ["pretrain.py", *PLAIN.split()]
    with contextlib.redirect_stdout(io.StringIO()):
        arguments.validate_args(arguments.parse_args())
    after = places()
    differing = changed(before, after)
    loaded = {target for target in of_device if target.partition(":")[0] in sys.modules}
    assert hooks | loaded <= differing
    # Whoever imported one of these by value, or a function of torch that the device layer redirects, follows.
    redirected = {
        id(value)
        for owner, names in zip((torch, torch.cuda, torch.distributed), of_torch, strict=True)
        for name, value in names.items()
        if vars(owner).get(name) is not value
    }
    followed = {id(before[place]) for place in hooks | loaded} | redirected
    unexpected = {place for place in differing if id(before.get(place)) not in followed}
    assert unexpected == set()
    assert mindspeed_lite.disable() == []
    assert changed(before, places()) == set()


USER_MODULE = """
from megatron.core.transformer.moe.moe_utils import maybe_move_tensor_to_cpu as m
from megatron.training.arguments import validate_args as v
"""
ORDERS = {
    "adaptor_first": "ADAPTOR\nimport torch\nMEGATRON\nimport by_value",
    "after_torch": "import torch\nADAPTOR\nMEGATRON\nimport by_value",
    "after_megatron": "import torch\nMEGATRON\nADAPTOR\nimport by_value",
    "after_importers_by_value": "import by_value\nMEGATRON\nADAPTOR",
}
PROBE = """
import json, sys, types
ours = {str(path) for path in (ROOT / "mindspeed_lite", ROOT / "patches")}
def mine(value):
    value = getattr(value, "__func__", value)
    code = getattr(value, "__code__", None)
    if code is not None:
        return any(code.co_filename.startswith(folder) for folder in ours)
    return isinstance(value, type) and value.__module__.startswith("mindspeed_lite.")
state = set()
for name, module in list(sys.modules.items()):
    if name.partition(".")[0] not in ("megatron", "by_value") or not isinstance(module, types.ModuleType):
        continue
    for key, value in list(vars(module).items()):
        if mine(value):
            state.add(f"{name}:{key}")
        if isinstance(value, type) and value.__module__ == name:
            state |= {f"{name}:{value.__qualname__}.{each}" for each, raw in list(vars(value).items()) if mine(raw)}
print("STATE" + json.dumps(sorted(state)))
sys.stdout.flush()
import io, contextlib
from megatron.training import arguments
sys.argv = ["pretrain.py", *PLAIN.split(), "--transformer-impl", "transformer_engine"]
arguments.validate_args(arguments.parse_args())
"""


EVERY_ORDER = pytest.mark.parametrize("order", matrix.only(["adaptor_first", "after_importers_by_value"], [*ORDERS]))


@pytest.fixture(scope="module")
def orders(tmp_path_factory):
    """For each order of imports, in a process of its own: the patched places, and how a refused run ends."""
    folder = tmp_path_factory.mktemp("orders")
    (folder / "by_value.py").write_text(USER_MODULE)
    lines = {
        "ADAPTOR": "import mindspeed_lite.megatron_adaptor",
        "MEGATRON": "import megatron.training.arguments, megatron.training.yaml_arguments, "
        "megatron.core.transformer.moe.moe_utils, megatron.core.transformer.torch_norm, "
        "megatron.core.optimizer.distrib_optimizer",
    }

    def run(name):
        text = ORDERS[name]
        for word, line in lines.items():
            text = text.replace(word, line)
        script = folder / f"{name}.py"
        head = f"import pathlib\nROOT = pathlib.Path({str(ROOT)!r})\nPLAIN = {PLAIN!r}\n"
        script.write_text(f"{text}\n{head}{PROBE}")
        path = os.pathsep.join([str(folder), clean_environment()["PYTHONPATH"]])
        ran = subprocess.run(
            [sys.executable, str(script)], env=clean_environment(PYTHONPATH=path), capture_output=True, text=True
        )
        states = [line for line in ran.stdout.splitlines() if line.startswith("STATE")]
        assert states, ran.stderr[-3000:]
        return set(json.loads(states[0].removeprefix("STATE"))), ran

    return functools.cache(run)


@EVERY_ORDER
def test_the_import_line_may_stand_anywhere(orders, order):
    (reference, _), (state, _) = orders("adaptor_first"), orders(order)
    assert {"by_value:v", "by_value:m", "megatron.training.arguments:validate_args"} <= reference
    assert "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__" in reference
    assert state ^ reference == set()


@EVERY_ORDER
def test_a_refused_flag_ends_the_run_whatever_the_order(orders, order):
    _, ran = orders(order)
    assert ran.returncode not in (0, None)
    last = ran.stderr.strip().splitlines()[-1]
    assert "OptionError: --transformer-impl transformer_engine needs Transformer Engine" in last
    assert "applied" not in ran.stdout


def test_the_import_line_costs_little_and_loads_nothing_of_megatron(tmp_path):
    code = textwrap.dedent("""
        import time
        import torch
        # Of this process alone: others may run beside it.
        start = time.process_time()
        import mindspeed_lite.megatron_adaptor
        print(time.process_time() - start)
        import sys
        assert not any(name.partition(".")[0] == "megatron" for name in sys.modules)
    """)
    seconds = []
    for _ in range(3):
        ran = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=clean_environment(), capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stderr
        seconds.append(float(ran.stdout))
    assert min(seconds) <= 0.2, seconds


@forked("torch", MINDSPEED_LITE_DISABLE="1")
def test_the_variable_makes_the_import_line_do_nothing():
    import torch

    owners = (torch, torch.cuda, torch.Tensor, torch.distributed, torch.random)
    before, environment = [dict(vars(each)) for each in owners], dict(os.environ)
    adaptor = __import__("mindspeed_lite.megatron_adaptor", fromlist=["x"])
    assert adaptor.disabled() and platform.current() is None and dict(os.environ) == environment
    for owner, names in zip(owners, before, strict=True):
        assert all(vars(owner).get(name) is value for name, value in names.items())
    assert not any(name.partition(".")[0] == "megatron" for name in sys.modules)
    assert "mindspeed_lite.patches._arguments" not in sys.modules
    for value, off in (("", False), ("0", False), ("false", False), ("No", False), ("1", True), ("yes", True)):
        os.environ["MINDSPEED_LITE_DISABLE"] = value
        assert adaptor.disabled() is off, value


def test_this_process_was_left_alone():
    """Everything above runs elsewhere; a test that changes torch for all the others would show here."""
    assert platform.current() is None and "mindspeed_lite.megatron_adaptor" not in sys.modules
    assert Path(mindspeed_lite.__file__).parents[1] == ROOT
