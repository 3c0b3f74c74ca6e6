"""Features in force and out again: nesting, the whole of Megatron as it was, and when the import line may stand."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import runpy
import subprocess
import sys
import types

import pytest

import mindspeed_lite
from mindspeed_lite import platform, runtime
from mindspeed_lite.engine import ApplyError, ConflictError, OptionError, PlanError, RequirementError, Settings
from mindspeed_lite.engine import swaps as engine_swaps
from mindspeed_lite.engine.swaps import in_force
from tests.harness import places, ranks
from tests.harness.checkouts import ROOT
from tests.harness.processes import clean_environment, forked

BOTH = {"use_fused_rmsnorm": True, "use_flash_attn": True}


def on():
    """By the patches in force, which of the features used here are; those of the device layer aside."""
    return {each.feature for each in in_force() if not each.feature.startswith("device_")}


def status(feature, report=None):
    report = report or mindspeed_lite.report()
    return next(entry.status for entry in report.entries if entry.feature == feature)


def changed(before, after):
    """Where something differs; the wrapper in a function is made anew for each set of patches."""
    found = places.changed(before, after)
    return {each.partition(" ")[0] for each in found if not each.endswith(engine_swaps._SLOT)}


@forked("megatron")
def test_every_kind_of_change_is_seen():
    def function(self, *, word=1):
        return word

    class Planted:
        method, static, own = function, staticmethod(lambda: 1), classmethod(lambda cls: 2)
        read = property(lambda self: 3)

    Planted.__module__, Planted.__qualname__ = "megatron.planted", "Planted"
    module = sys.modules["megatron.planted"] = types.ModuleType("megatron.planted")
    module.Planted, module.value, module.function, module.gone = Planted, [1], lambda x=(1,): x, 1
    before = places.snapshot()
    assert places.changed(before, places.snapshot()) == set()
    module.value = [1]
    module.function.__defaults__ = ((2,),)
    module.function.mark = object()
    module.new = 1
    del module.gone
    function.__kwdefaults__ = {"word": object()}
    Planted.read.fget.__code__ = (lambda self: 4).__code__
    vars(Planted)["own"].__func__.__code__ = (lambda cls: 5).__code__
    Planted.static = staticmethod(lambda: 1)
    planted, after = "megatron.planted:", places.snapshot()
    assert places.changed(before, after) == {
        *(f"{planted}{each}" for each in ("value", "new", "gone", "Planted.static", "Planted.static __code__")),
        *(f"{planted}{each}" for each in ("function __defaults__", "function __dict__ mark")),
        *(f"{planted}Planted.{each}" for each in ("method __kwdefaults__ word", "read __code__", "own __code__")),
    }
    assert places.held(after, f"{planted}Planted.read __code__") is vars(Planted)["read"]
    assert places.held(before, f"{planted}new") is None and places.held(after, f"{planted}new") == 1


@forked("megatron")
def test_calls_add_up_and_a_block_restores_what_was_before():
    platform.activate()
    start = places.snapshot()
    first = mindspeed_lite.enable(use_fused_rmsnorm=True)
    assert status("use_fused_rmsnorm", first) == "applied" and status("use_flash_attn", first) == "off"
    outer = in_force()
    with mindspeed_lite.enabled(use_flash_attn=True) as second:
        assert status("use_flash_attn", second) == status("use_fused_rmsnorm") == "applied"
        now = in_force()
        with mindspeed_lite.enabled(use_fused_rmsnorm=True):
            assert in_force() == now, "the same feature again is once"
        with mindspeed_lite.enabled(use_fused_rmsnorm=False):
            assert on() == {"use_flash_attn"}, "of two values for a flag the later one counts"
        assert on() == set(BOTH)
    assert on() == {"use_fused_rmsnorm"} and len(in_force()) == len(outer)
    # An outer block that is left first takes the inner ones with it.
    blocks = [mindspeed_lite.enabled(**{name: True}) for name in ("use_fused_swiglu", "use_flash_attn")]
    for block in blocks:
        block.__enter__()
    assert on() == {"use_fused_swiglu", *BOTH}
    for block in blocks:
        block.__exit__(None, None, None)
        assert on() == {"use_fused_rmsnorm"}
    block = mindspeed_lite.enabled(use_flash_attn=True)
    block.__enter__()
    assert mindspeed_lite.disable() == [] == mindspeed_lite.disable() and mindspeed_lite.report() is None
    block.__exit__(None, None, None)
    assert on() == set() and platform.current() is not None
    assert not changed(start, places.snapshot()), changed(start, places.snapshot())


@forked("megatron")
def test_requirements_and_conflicts_hold_across_calls():
    mindspeed_lite.enable(moe_grouped_gemm=True, gradient_accumulation_fusion=True)
    report = mindspeed_lite.enable(moe_wgrad_side_stream="always")
    assert status("moe_grouped_gemm", report) == "applied" != status("moe_wgrad_side_stream", report)
    with pytest.raises(RequirementError, match="moe_wgrad_side_stream"):
        mindspeed_lite.enable(moe_grouped_gemm=False)
    assert mindspeed_lite.report().as_dict() == report.as_dict()
    mindspeed_lite.disable()
    mindspeed_lite.enable(swap_optimizer=True, use_fused_adamw=True)
    with pytest.raises(ConflictError, match="both keep Adam's moments in host memory"):
        mindspeed_lite.enable(virtual_optimizer=[1])
    assert "use_fused_adamw" in on()


@forked("megatron")
def test_the_same_feature_with_other_flags_is_made_anew():
    platform.activate()
    before = places.snapshot()
    mindspeed_lite.enable(recompute_norm_num_layers=1)
    view, standing = runtime.current().swaps["recompute_norm"][0].session, len(in_force())
    kept = view.state("kept", object)
    mindspeed_lite.enable(recompute_norm_num_layers=2)
    again = runtime.current().swaps["recompute_norm"][0].session
    assert again is not view and again.settings.recompute_norm_num_layers == 2 and len(in_force()) == standing
    assert again.find("kept") is None and again.state("kept", object) is not kept
    report = mindspeed_lite.report()
    flags = next(each.flags for each in report.entries if each.feature == "recompute_norm")
    assert flags["--recompute-norm-num-layers"] == 2
    mindspeed_lite.disable()
    assert changed(before, places.snapshot()) == set()


class Injected(Exception):
    """Not one of the errors that anything here raises by itself."""


@forked("megatron")
def test_what_a_failed_feature_kept_and_marked_is_gone():
    from dataclasses import replace

    import torch

    catalogue, layer, ended = runtime.catalogue(), torch.nn.Linear(1, 1), []
    own = catalogue["use_flash_attn"]

    def make(wrapped, session):
        session.mark(layer, "chosen", True)
        session.state("kept", list)
        session.on_end(lambda: ended.append(1))
        raise Injected

    patches = (*own.patches[:-1], replace(own.patches[-1], make=make))
    catalogue._features["use_flash_attn"] = replace(own, patches=patches)
    mindspeed_lite.enable(use_fused_rmsnorm=True)
    with pytest.raises(ApplyError, match=r"`use_flash_attn` could not override .*Injected"):
        mindspeed_lite.enable(use_flash_attn=True)
    assert ended == [1] and not hasattr(layer, "chosen") and on() == {"use_fused_rmsnorm"}
    assert runtime.current().session.find("kept") is None
    report = mindspeed_lite.enable(auto=True)
    assert status("use_flash_attn", report) == "off" and ended == [1, 1], "auto goes on without it"
    (entry,) = (each for each in report.entries if each.feature == "use_flash_attn")
    assert "Injected" in entry.reasons[0]


@pytest.mark.parametrize(
    ("keyword", "hint"),
    [
        ("use_fused_rms_norm", "did you mean use_fused_rmsnorm"),
        ("strikt", "did you mean strict"),
        ("flash", "use_flash_attn"),
        ("xyz", "there are .*use_fused_rmsnorm"),
        ("gradient_accumulation_fusio", r"did you mean gradient_accumulation_fusion[,?]"),
    ],
)
def test_an_unknown_keyword_is_an_error_with_a_hint(keyword, hint):
    for call in (mindspeed_lite.enable, mindspeed_lite.enabled):
        with pytest.raises(OptionError, match=f"no option '{keyword}'.*{hint}"):
            entered = call(**{keyword: True})
            entered.__enter__()
    assert platform.current() is None and mindspeed_lite.report() is None


def test_all_unknown_keywords_are_named_at_once():
    with pytest.raises(OptionError, match=r"no option 'strikt'.*no option 'flash'"):
        mindspeed_lite.enable(strikt=True, flash=True)


def test_the_name_of_every_feature_turns_it_on():
    for feature in runtime.catalogue():
        for value in (True, False):
            flags = runtime.by_keyword({feature.name: value}, None).flags
            settings = Settings.of(runtime.catalogue().options(), flags)
            assert feature.is_enabled(settings) is value, feature.name
    rows = re.findall(r'^\| `(\w+)` \| `\[?"(.*)"\]?` \|$', (ROOT / "docs" / "flags.md").read_text(), re.MULTILINE)
    values = {option.dest: option.on for option in runtime.catalogue().options() if option.on is not None}
    assert dict(rows) == {name: on if isinstance(on, str) else on[0] for name, on in values.items()}
    for keyword in ("use_bias_dropout_fusion", "use_gradient_accumulation_fusion", "use_masked_softmax_fusion"):
        assert {*runtime.by_keyword({keyword: 1, keyword.removeprefix("use_"): 1}, None).flags} == {keyword}


@forked("torch")
def test_without_megatron_the_error_says_how_to_get_it():
    import importlib.util

    find = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *rest: None if name == "megatron" else find(name, *rest)
    with pytest.raises(PlanError, match=r"pip install megatron-core.*PYTHONPATH"):
        mindspeed_lite.enable(use_fused_rmsnorm=True)


PLAIN = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 2 --lr 1e-3 --train-iters 3 --bf16 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 255 --normalization RMSNorm"
)


@forked("megatron")
def test_without_a_flag_only_the_argument_hooks_and_the_device_layer_differ():
    import torch

    from mindspeed_lite.platform import megatron

    hooks = {
        f"megatron.training.arguments:{name}" for name in ("add_megatron_arguments", "parse_args", "validate_args")
    }
    hooks.add("megatron.training.yaml_arguments:validate_yaml")
    of_device = {
        patch.target for feature in megatron.ASSUMPTIONS for patch in feature.patches_for(megatron.version())[0]
    }
    owners = (torch, torch.cuda, torch.distributed)
    before, of_torch = places.snapshot(), [
        {name: (value, getattr(value, "__code__", None)) for name, value in vars(each).items()} for each in owners
    ]  # fmt: skip
    from megatron.training import arguments

    import mindspeed_lite.megatron_adaptor

    sys.argv = ["pretrain.py", *PLAIN.split()]
    with contextlib.redirect_stdout(io.StringIO()):
        arguments.validate_args(arguments.parse_args())
    after = places.snapshot()
    differing = changed(before, after)
    loaded = {target for target in of_device if target.partition(":")[0] in sys.modules}
    assert hooks | loaded <= differing
    # Functions change in place, under every name; so does a function of torch that the device layer redirects.
    redirected = {
        id(value)
        for owner, names in zip(owners, of_torch, strict=True)
        for name, (value, code) in names.items()
        if vars(owner).get(name) is not value or getattr(value, "__code__", None) is not code
    }
    followed = {id(places.held(before, place)) for place in hooks | loaded} | redirected
    unexpected = {place for place in differing if id(places.held(before, place)) not in followed}
    assert unexpected == set()
    assert mindspeed_lite.disable() == []
    assert changed(before, places.snapshot()) >= loaded, "Megatron trains on here"
    platform.deactivate()
    assert changed(before, places.snapshot()) == set()


ADAPTOR = "import mindspeed_lite.megatron_adaptor"
MEGATRON = "import megatron.training.arguments, megatron.core.transformer.torch_norm"
PROBE = f"""
import sys
from mindspeed_lite.engine.swaps import in_force
print("STATE", sorted(each.patch.target for each in in_force()), flush=True)
from megatron.training import arguments
sys.argv = ["pretrain.py", *{PLAIN.split()!r}, "--transformer-impl", "transformer_engine"]
arguments.validate_args(arguments.parse_args())
"""


@forked("features")
def test_the_import_line_may_stand_anywhere_and_a_refused_flag_ends_the_run(tmp_path):
    states, out, err = [], tmp_path / "out", tmp_path / "err"
    for head in (
        f"{ADAPTOR}\n{MEGATRON}",
        f"from megatron.training.arguments import validate_args\n{MEGATRON}\n{ADAPTOR}",
    ):
        script = tmp_path / "script.py"
        script.write_text(f"{head}\n{PROBE}")
        body = functools.partial(runpy.run_path, str(script), run_name="__main__")
        assert ranks.wait([ranks.start(body, out, err)], 300) == [2]
        states += [line for line in out.read_text().splitlines() if line.startswith("STATE")]
        last = err.read_text().strip().splitlines()[-1]
        assert "mindspeed_lite: error: --transformer-impl transformer_engine needs Transformer Engine" in last
        assert "applied" not in out.read_text()
    assert "arguments:validate_args" in states[0] and "WrappedTorchNorm.__new__" in states[0]
    assert states[0] == states[1]


def test_the_import_line_costs_little_and_loads_nothing_of_megatron(tmp_path):
    # Of this process alone: others may run at the same time.
    code = """if True:
        import sys, time, torch
        start = time.process_time()
        import mindspeed_lite.megatron_adaptor
        print(time.process_time() - start)
        assert not any(name.partition(".")[0] == "megatron" for name in sys.modules)
    """
    command, seconds = [sys.executable, "-c", code], []
    for _ in range(3):
        ran = subprocess.run(command, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        seconds.append(float(ran.stdout))
        if seconds[-1] <= 0.2:
            break
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
    assert "mindspeed_lite.startup" not in sys.modules
    for value, off in (("", False), ("0", False), ("false", False), ("No", False), ("1", True), ("yes", True)):
        os.environ["MINDSPEED_LITE_DISABLE"] = value
        assert adaptor.disabled() is off, value


@forked("megatron")
def test_a_feature_that_only_sets_arguments_is_skipped_where_nothing_sets_them():
    host_args = {"num_experts": 8, "tensor_model_parallel_size": 2, "expert_model_parallel_size": 1}
    entry = next(
        each
        for each in mindspeed_lite.enable(moe_tp_extend_ep=True, host_args=host_args).entries
        if each.feature == "moe_tp_extend_ep"
    )
    assert entry.status == "skipped" and "expert_model_parallel_size = 2" in entry.reasons[0] and not entry.arguments
    mindspeed_lite.disable()
    host_args |= {"expert_tensor_parallel_size": 1, "expert_model_parallel_size": 2}
    with pytest.raises(PlanError, match="strict mode"):
        mindspeed_lite.enable(moe_tp_extend_ep=True, strict=True, host_args=host_args)


@forked("megatron")
def test_what_a_configuration_object_does_not_decide_is_no_reason():
    import torch.nn.functional as F
    from megatron.core.transformer import TransformerConfig

    def chosen(**fields):
        sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "add_bias_linear": False}
        report = mindspeed_lite.enable(auto=True, host_args=TransformerConfig(**sizes, **fields))
        found = on()
        mindspeed_lite.disable()
        return found, " ".join(report.to_text().split())

    gated = {"gated_linear_unit": True, "activation_func": F.silu}
    found, text = chosen(normalization="RMSNorm", **gated)
    of_the_default = {"use_flash_attn", "use_fused_rmsnorm", "use_fused_rotary_pos_emb", "use_fused_swiglu"}
    assert found >= {*of_the_default, "gradient_accumulation_fusion", "reset_bucket_group_order"}
    assert "quant_states, virtual_optimizer: it needs a value" in text
    assert "use_fused_layernorm: the model has --normalization RMSNorm" in text
    assert "moe_router_fusion" not in found and "moe_router_fusion" in text
    found, text = chosen(num_moe_experts=4)
    assert {"moe_router_fusion", "use_fused_layernorm"} <= found and "use_fused_swiglu" not in found
    assert "use_fused_swiglu: the model's activation is GELU without bias" in text
