"""Defaults that need a missing package, and what stops a training before it starts."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch

from mindspeed_lite.engine import OptionError
from mindspeed_lite.patches._shared import megatron_arguments
from mindspeed_lite.patches._shared.megatron_arguments import check_arguments as check
from tests.harness.processes import forked

DEMANDING = {default.dest: default.demanding for default in megatron_arguments.DEFAULTS}
MODULES = ("transformer_engine", "fused_weight_gradient_mlp_cuda", "apex", "scaled_masked_softmax_cuda")


@pytest.fixture
def machine(monkeypatch):
    """`machine(*packages)`: exactly these of the packages in question are installed; a compiler is there."""
    find = importlib.util.find_spec

    def have(*packages):
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name, *rest: (object() if name in packages else None) if name in MODULES else find(name, *rest),
        )

    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(megatron_arguments.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(megatron_arguments, "import_error", lambda: None)
    have()
    return have


def switched(device, explicit=(), **values):
    args = SimpleNamespace(**{**DEMANDING, **values})
    notices = megatron_arguments.switch(args, device, explicit)
    return {name for name in DEMANDING if getattr(args, name) != DEMANDING[name]}, notices, args


ALWAYS_ON_CPU = set(DEMANDING) - {"disable_jit_fuser"}


def test_on_the_cpu_everything_that_needs_a_kernel_is_switched(machine):
    names, notices, args = switched("cpu")
    assert names == ALWAYS_ON_CPU
    assert len(notices) == len({default.flag for default in megatron_arguments.DEFAULTS if default.dest in names})
    for default in megatron_arguments.DEFAULTS:
        if default.dest in names:
            assert getattr(args, default.dest) == default.instead
            (about,) = [argument for notice, argument in notices.items() if default.flag in notice]
            assert about in names


@pytest.mark.parametrize(
    ("device", "absent", "names"),
    [
        ("cpu", "", ALWAYS_ON_CPU),
        ("npu", "", ALWAYS_ON_CPU),
        ("cuda", "", set()),
        ("cuda", "transformer_engine", {"transformer_impl", "apply_rope_fusion"}),
        ("cuda", "fused_weight_gradient_mlp_cuda", {"gradient_accumulation_fusion"}),
        ("cuda", "apex", {"no_persist_layer_norm", "persist_layer_norm"}),
        ("cuda", "scaled_masked_softmax_cuda", {"masked_softmax_fusion"}),
    ],
)
def test_installed_packages_help_on_cuda_alone(machine, device, absent, names):
    machine(*(name for name in MODULES if name != absent))
    found, notices, _ = switched(device)
    assert found == names and bool(notices) == bool(names)
    # Asking for what is there is granted.
    assert device != "cuda" or absent or switched(device, explicit={"transformer_impl"})[1] == {}


def test_a_transformer_engine_without_its_extension_is_missing(machine, monkeypatch):
    machine(*MODULES)
    assert "transformer_impl" not in switched("cuda")[0]
    monkeypatch.setattr(megatron_arguments, "import_error", lambda: OSError("no libtransformer_engine.so"))
    found, notices, _ = switched("cuda")
    assert "transformer_impl" in found and any("OSError: no libtransformer_engine.so" in each for each in notices)


def test_without_a_compiler_the_jit_fuser_is_off(machine, monkeypatch):
    monkeypatch.setattr(megatron_arguments.shutil, "which", lambda name: None)
    assert "disable_jit_fuser" in switched("cpu")[0]
    assert "disable_jit_fuser" not in switched("cuda")[0]
    monkeypatch.setattr(megatron_arguments.shutil, "which", lambda name: "/bin/x" if name == "icpx" else None)
    assert "disable_jit_fuser" in switched("cpu")[0]
    monkeypatch.setenv("CXX", "icpx")
    assert "disable_jit_fuser" not in switched("cpu")[0], "torch uses the compiler that CXX names"
    monkeypatch.setenv("CXX", "")
    assert "disable_jit_fuser" in switched("cpu")[0], "torch takes an empty name for one"


def test_without_a_compiler_what_megatron_compiled_at_import_runs_as_written(machine, monkeypatch):
    compiled = torch.compile(lambda x: x + torch.compiler.is_compiling(), backend="eager")
    off, on = SimpleNamespace(disable_jit_fuser=True), SimpleNamespace(disable_jit_fuser=False)
    assert megatron_arguments.disable_compile(off, "cpu") is None, "a compiler is there"
    monkeypatch.setattr(megatron_arguments.shutil, "which", lambda name: None)
    assert megatron_arguments.disable_compile(on, "cpu") is megatron_arguments.disable_compile(off, "cuda") is None
    assert compiled(torch.zeros(1)) == 1
    restore = megatron_arguments.disable_compile(off, "cpu")
    try:
        assert compiled(torch.zeros(1)) == 0
    finally:
        restore()
    assert compiled(torch.zeros(1)) == 1


@pytest.mark.parametrize(
    ("args", "explicit"),
    [
        ({default.dest: default.instead for default in megatron_arguments.DEFAULTS}, ()),
        ({"transformer_impl": "inference_optimized"}, ()),
        ({"transformer_impl": "local"}, {"transformer_impl"}),
    ],
)
def test_what_demands_nothing_is_left_alone(machine, args, explicit):
    given = SimpleNamespace(**args)
    assert megatron_arguments.switch(given, "cpu", explicit) == {} and vars(given) == args


def test_asking_for_what_is_absent_is_an_error_that_says_what_to_do(machine):
    args = SimpleNamespace(**DEMANDING)
    with pytest.raises(OptionError) as caught:
        megatron_arguments.switch(args, "cpu", {"transformer_impl"})
    text = str(caught.value)
    assert "--transformer-impl transformer_engine needs Transformer Engine" in text
    assert "--transformer-impl local" in text and "install" in text
    assert vars(args) == DEMANDING, "nothing has been switched"


@pytest.mark.parametrize("default", [each for each in megatron_arguments.DEFAULTS if each.stand_in], ids=str)
def test_a_feature_that_is_on_keeps_the_default_that_it_serves(machine, default):
    for on in (False, True):
        args = SimpleNamespace(**{default.dest: True, default.stand_in: on})
        notices = megatron_arguments.switch(args, "cpu", ())
        assert getattr(args, default.dest) is on and len(notices) == (not on)


ARGV = (
    "train --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 1 --lr 1e-3 --train-iters 1 --bf16 --normalization RMSNorm --position-embedding-type rope"
)
EXPERTS = (
    "--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
    "--overlap-moe-expert-parallel-comm --transformer-impl local"
)
WGRAD, NO_WGRAD, AUTO = "--gradient-accumulation-fusion", "--no-gradient-accumulation-fusion", "--mindspeed-lite-auto"


@pytest.mark.parametrize(
    ("flags", "fusion", "status", "rope"),
    [
        ("", False, "off", False),
        (WGRAD, True, "applied", False),
        (NO_WGRAD, False, "off", False),
        (f"{WGRAD} {NO_WGRAD}", False, "skipped", False),
        (AUTO, True, "applied", True),
        (f"{AUTO} {NO_WGRAD}", False, "off", True),
        ("--use-fused-rotary-pos-emb", False, "off", True),
        (f"{AUTO} {EXPERTS}", True, "applied", True),
    ],
)
@forked("megatron")
def test_flags_meet_those_of_megatron(flags, fusion, status, rope):
    from megatron.training import arguments

    import mindspeed_lite.megatron_adaptor

    sys.argv = f"{ARGV} {flags}".split()
    args = arguments.parse_args()
    args.rank, args.world_size = 0, 1 + (EXPERTS in flags)
    arguments.validate_args(args)
    report = mindspeed_lite.report()
    assert (args.gradient_accumulation_fusion, args.apply_rope_fusion) == (fusion, rope)
    assert args.delay_wgrad_compute is (EXPERTS in flags), "where a schedule asks"
    entry = next(each for each in report.entries if each.feature == "gradient_accumulation_fusion")
    assert entry.status == status, entry.reasons
    switched = [any(f"{flag} set" in each for each in report.notices) for flag in (NO_WGRAD, "--no-rope-fusion")]
    assert switched == [not fusion and NO_WGRAD not in flags, not rope]


@pytest.fixture
def data(tmp_path):
    for name in ("text.idx", "text.bin", "half.idx"):
        (tmp_path / name).write_text("")
    (tmp_path / "energon").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"data_path": None, "context_parallel_size": 1, "world_size": 1},
        {"data_path": ["text"]},
        {"data_path": ["0.3", "text", "7e-1", "text"]},
        {"data_path": ["energon"]},
        {"data_path": ["s3://bucket/text"], "data_args_path": "msc://bucket/list"},
        {"data_path": ["none"], "mock_data": True},
        {"context_parallel_size": 2, "tensor_model_parallel_size": 2, "world_size": 8},
        {"pipeline_model_parallel_size": 2},
        {"num_layers": None, "hybrid_layer_pattern": "M*"},
        {"seq_length": None, "encoder_seq_length": 64},
    ],
)
def test_what_megatron_may_go_on_with(data, monkeypatch, arguments):
    monkeypatch.chdir(data)
    check(arguments)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"data_path": ["none"]}, r"--data-path none: there is no none.idx and no none.bin"),
        ({"data_path": ["0.5", "text", "0.5", "half"]}, r"--data-path half: there is no half.bin"),
        ({"valid_data_path": ["none"]}, r"--valid-data-path none"),
        ({"per_split_data_args_path": "none"}, r"--per-split-data-args-path none: there is no such file"),
        (
            {"context_parallel_size": 4, "tensor_model_parallel_size": 2, "world_size": 12},
            r"--tensor-model-parallel-size 2 --context-parallel-size 4: needs 8 processes, .* has 12\. .*per-node 8",
        ),
        ({"context_parallel_size": 0, "world_size": 2}, r"--context-parallel-size 0: must be at least 1\."),
        ({"tensor_model_parallel_size": -1}, r"--tensor-model-parallel-size -1: must be at least 1\."),
        (
            {"num_layers": None, "hidden_size": None, "micro_batch_size": 1, "data_path": ["none"]},
            r"^--num-layers, --hidden-size: not given, and Megatron needs them\. --data-path none: ",
        ),
    ],
)
def test_what_it_would_end_in_a_traceback_with(data, monkeypatch, arguments, text):
    monkeypatch.chdir(data)
    with pytest.raises(OptionError, match=text):
        check(arguments)


def test_a_rank_that_reads_no_data_need_not_have_it(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    check({"data_path": ["none"]})
