"""Flags on their way through Megatron's own parser and validation, from the command line and from YAML."""

from __future__ import annotations

import contextlib
import io
import sys

import pytest

import mindspeed_lite
from mindspeed_lite import runtime
from mindspeed_lite.engine import EngineError, OptionError, PlanError
from mindspeed_lite.engine.swaps import in_force
from tests.harness.plans import is_swapped
from tests.harness.processes import forked

PLAIN = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 2 --lr 1e-3 --train-iters 3 --bf16 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 255 --normalization RMSNorm"
).split()

# What Megatron's YAML route reads, in its own nesting.
YAML = """
language_model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4, ffn_hidden_size: null, kv_channels: null,
  activation_func: swiglu, fp32_residual_connection: false, moe_grouped_gemm: false, num_moe_experts: null,
  persist_layer_norm: false, distribute_saved_activations: false, recompute_granularity: null,
  normalization: RMSNorm, apply_rope_fusion: false, masked_softmax_fusion: false}
model_parallel: {tensor_model_parallel_size: 1, pipeline_model_parallel_size: 1, context_parallel_size: 1,
  expert_model_parallel_size: 1, tp_comm_overlap: false, sequence_parallel: false, fp16: false, bf16: true,
  params_dtype: null, gradient_accumulation_fusion: false}
transformer_impl: local
account_for_embedding_in_pipeline_split: false
data_path: null
micro_batch_size: 2
global_batch_size: 2
step_batch_size_schedule: null
num_layers_per_virtual_pipeline_stage: null
overlap_param_gather: false
accumulate_allreduce_grads_in_fp32: true
dataloader_type: null
train_iters: 3
train_samples: null
lr_decay_samples: null
lr_warmup_samples: 0
lr_warmup_fraction: null
lr_warmup_iters: 0
encoder_num_layers: null
seq_length: 64
encoder_seq_length: null
decoder_seq_length: null
max_position_embeddings: 64
lr: 1.0e-3
min_lr: 0.0
save: null
fp16_lm_cross_entropy: false
weight_decay: 0.1
weight_decay_incr_style: constant
start_weight_decay: null
end_weight_decay: null
use_checkpoint_args: false
disable_msc_deprecated: false
enable_msc: false
"""


def import_adaptor():
    import mindspeed_lite.megatron_adaptor as adaptor

    return adaptor


def parsed(*flags, plain=PLAIN, **keywords):
    from megatron.training import arguments

    sys.argv = ["pretrain.py", *plain, *flags]
    return arguments.parse_args(**keywords)


def validated(*flags, **keywords):
    """(arguments, what was printed) after Megatron's whole route, short of its global variables."""
    from megatron.training import arguments, yaml_arguments

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        args = parsed(*flags, **keywords)
        if args.yaml_cfg is not None:
            args = yaml_arguments.validate_yaml(args)
        else:
            arguments.validate_args(args)
    return args, printed.getvalue()


def entry(feature):
    return next(each for each in mindspeed_lite.report().entries if each.feature == feature)


def norm_is_fused():
    return any(each.feature == "use_fused_rmsnorm" for each in in_force())


@forked("megatron", COLUMNS="200")
def test_help_shows_every_flag_and_without_one_the_namespace_is_megatrons_plus_our_defaults():
    args = vars(parsed())
    import_adaptor()
    with_us = vars(parsed())
    options = (*runtime.GENERAL, *runtime.catalogue().options())
    ours = {option.dest: option.default for option in options}
    assert {name: value for name, value in with_us.items() if name not in ours} == {
        name: value for name, value in args.items() if name not in ours
    }
    # A flag that Megatron has keeps Megatron's own default, which may be a member of an enumeration.
    assert {name: with_us[name] for name in ours} == {name: args.get(name, value) for name, value in ours.items()}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as ending:
        parsed("--help")
    assert ending.value.code == 0 and "mindspeed_lite: use_fused_rmsnorm:" in printed.getvalue()
    assert all(f"  {option.flag}" in printed.getvalue() for option in options)


@forked("megatron")
def test_finding_out_what_was_explicit_parses_nothing_twice_into_the_result():
    import_adaptor()

    def extra(parser):
        parser.add_argument("--append-it", action="append", default=[])
        parser.add_argument("--count-it", action="count", default=0)
        parser.add_argument("--demanded", required=True, type=int)
        return parser

    given = ["--append-it", "a", "--append-it", "b", "--count-it", "--demanded", "7", "--data-path", "x", "y"]
    args = parsed(*given, extra_args_provider=extra)
    assert (args.append_it, args.count_it, args.demanded, args.data_path) == (["a", "b"], 1, 7, ["x", "y"])
    args = parsed("--no-such-flag", "1", ignore_unknown_args=True)
    assert args.num_layers == 2 and not hasattr(args, "no_such_flag")
    with contextlib.redirect_stderr(io.StringIO()) as errors, pytest.raises(SystemExit) as ending:
        parsed("--use-fused-rmsnrm")
    assert ending.value.code == 2 and "--use-fused-rmsnrm" in errors.getvalue()


@forked("megatron")
def test_plain_defaults_are_switched_with_one_notice_each():
    import_adaptor()
    args, printed = validated()
    assert args.transformer_impl == "local" and args.no_persist_layer_norm
    assert not args.apply_rope_fusion and not args.gradient_accumulation_fusion and not args.masked_softmax_fusion
    notices = mindspeed_lite.report().notices
    negated = ("rope-fusion", "gradient-accumulation-fusion", "persist-layer-norm", "masked-softmax-fusion")
    for flag in ("--transformer-impl local", *(f"--no-{each}" for each in negated)):
        assert sum(notice.startswith(f"{flag} set:") for notice in notices) == 1, flag
        assert printed.count(f"{flag} set:") == 1, flag
    assert printed.index("mindspeed_lite") < printed.index("--no-rope-fusion set:"), "inside the report's frame"


@forked("megatron")
def test_errors_of_flags_are_one_line_and_nothing_is_applied(tmp_path):
    import_adaptor()
    absent = r"--transformer-impl transformer_engine needs Transformer Engine.*--transformer-impl local"
    unfitting = ("--use-fused-rmsnorm", "--normalization", "LayerNorm", "--mindspeed-lite-strict")
    for flags, error, says in (
        (("--transformer-impl", "transformer_engine", "--use-fused-rmsnorm"), OptionError, absent),
        (("--transformer-impl=transformer_engine",), OptionError, absent),
        (("--use-fused-rmsnorm", "--mindspeed-lite-report", str(tmp_path / "none" / "r.json")), OptionError, "written"),
        (unfitting, PlanError, r"strict mode.*--use-fused-rmsnorm.*--normalization LayerNorm"),
    ):
        with pytest.raises(error, match=says):
            validated(*flags)
        assert mindspeed_lite.report() is None and not norm_is_fused()
    validated("--use-fused-rmsnorm")
    before = mindspeed_lite.report()
    with pytest.raises(PlanError):
        validated(*unfitting)
    assert mindspeed_lite.report() == before and norm_is_fused(), "the first validation stays in force"


@forked("megatron", RANK="1", WORLD_SIZE="2")
def test_other_ranks_apply_and_say_nothing(tmp_path):
    import_adaptor()
    _, printed = validated("--use-fused-rmsnorm", "--mindspeed-lite-report", str(tmp_path / "report.json"))
    assert entry("use_fused_rmsnorm").status == "applied"
    assert printed == "" and not (tmp_path / "report.json").exists()


@forked("megatron")
def test_auto_turns_on_what_applies_and_says_why_not_the_rest():
    import_adaptor()
    args, _ = validated("--mindspeed-lite-auto")
    assert entry("use_fused_rmsnorm").status == entry("use_flash_attn").status == "applied"
    assert args.create_attention_mask_in_dataloader is False
    verbose = ("--mindspeed-lite-report", "verbose")
    _, printed = validated("--mindspeed-lite-auto", "--normalization", "LayerNorm", *verbose)
    assert entry("use_flash_attn").status == "applied" and entry("use_fused_rmsnorm").status == "off"
    assert entry("use_fused_rmsnorm").reasons == ["the model has --normalization LayerNorm, not RMSNorm"]
    assert "use_fused_rmsnorm: the model has --normalization LayerNorm" in " ".join(printed.split())


def yaml_file(folder, text=""):
    path = folder / "config.yaml"
    path.write_text(YAML + text)
    return str(path)


@forked("megatron")
def test_a_key_in_the_yaml_file_is_a_flag_and_the_command_line_counts_more(tmp_path):
    import_adaptor()
    file, other = tmp_path / "a.json", tmp_path / "b.json"
    keys = f"use_flash_attn: true\nuse_fused_rmsnorm: true\nmindspeed_lite_report: {file}\n"
    args, _ = validated("--yaml-cfg", yaml_file(tmp_path, keys), plain=[])
    assert entry("use_flash_attn").status == entry("use_fused_rmsnorm").status == "applied"
    assert args.create_attention_mask_in_dataloader is False and file.exists()
    flags = ("--yaml-cfg", yaml_file(tmp_path, keys), "--mindspeed-lite-report", str(other))
    args, _ = validated(*flags, plain=[])
    assert args.mindspeed_lite_report == str(other) and other.exists()


@forked("megatron")
def test_a_flag_that_is_also_a_field_of_a_yaml_files_model_is_set_where_the_model_reads_it(tmp_path):
    import_adaptor()
    flags = ("--moe-grouped-gemm", "--moe-permute-fusion")
    text = YAML.replace("num_moe_experts: null", "num_moe_experts: 4, moe_permute_fusion: false")
    (tmp_path / "c.yaml").write_text(text + "num_experts: 4\n")
    args, _ = validated("--yaml-cfg", str(tmp_path / "c.yaml"), *flags, plain=[])
    assert args.language_model.moe_grouped_gemm is args.moe_grouped_gemm is True
    assert args.language_model.moe_permute_fusion is args.moe_permute_fusion is True
    assert entry("moe_grouped_gemm").status == entry("moe_permute_fusion").status == "applied"


@forked("megatron")
def test_a_yaml_files_nested_values_are_seen_and_unknown_ones_are_an_error(tmp_path):
    import_adaptor()
    for key, says in (
        ("use_fused_rmsnorm: maybe", "--use-fused-rmsnorm is a switch and takes True or False, not 'maybe'"),
        ("use_flash_attn: 1", "--use-flash-attn is a switch and takes True or False, not 1"),
        ("mindspeed_lite_report: 3", "--mindspeed-lite-report takes text, not 3"),
    ):
        with pytest.raises(OptionError, match=says):
            validated("--yaml-cfg", yaml_file(tmp_path, key + "\n"), plain=[])
        assert mindspeed_lite.report() is None and not norm_is_fused()
    text = YAML.replace("normalization: RMSNorm", "normalization: LayerNorm")
    (tmp_path / "c.yaml").write_text(text + "use_fused_rmsnorm: true\n")
    validated("--yaml-cfg", str(tmp_path / "c.yaml"), plain=[])
    assert entry("use_fused_rmsnorm").status == "skipped"


MOE = ("--num-experts", "8", "--moe-router-topk", "2", "--expert-model-parallel-size", "2",
       "--tensor-model-parallel-size", "2", "--sequence-parallel")  # fmt: skip
EXTENDED = ("--expert-tensor-parallel-size", "1", "--expert-model-parallel-size", "4")


def both_ways(flags, spelled_out):
    """The arguments by our flags and by Megatron's own, without those that are the flags themselves."""
    ours = {option.dest for option in runtime.catalogue().options()}
    args, _ = validated(*flags)
    with_flags = {name: repr(value) for name, value in vars(args).items() if name not in ours}
    args, _ = validated(*spelled_out)
    return with_flags, {name: repr(value) for name, value in vars(args).items() if name not in ours}


@forked("megatron", WORLD_SIZE="4")
def test_what_megatron_derives_follows_the_arguments_that_a_feature_sets():
    import_adaptor()
    found, wanted = both_ways((*MOE, "--moe-tp-extend-ep"), (*MOE, *EXTENDED))
    assert found == wanted and found["expert_model_parallel_size"] == "4"
    validated(*MOE, "--moe-tp-extend-ep")
    sizes = {"expert_tensor_parallel_size": 1, "expert_model_parallel_size": 4}
    assert (entry("moe_tp_extend_ep").status, entry("moe_tp_extend_ep").arguments) == ("applied", sizes)


@forked("megatron", WORLD_SIZE="4")
def test_nothing_is_set_where_the_feature_does_not_apply():
    import_adaptor()
    for more, says in (
        (("--num-experts", "6"), "cannot be divided"),
        (("--tensor-model-parallel-size", "1"), "there is nothing to extend by"),
        (("--expert-tensor-parallel-size", "2"), "--expert-tensor-parallel-size 2 is given"),
    ):
        found, wanted = both_ways((*MOE, *more, "--moe-tp-extend-ep"), (*MOE, *more))
        assert found == wanted
        _, printed = validated(*MOE, *more, "--moe-tp-extend-ep")
        assert (entry("moe_tp_extend_ep").status, entry("moe_tp_extend_ep").arguments) == ("skipped", {})
        assert says in " ".join(printed.split()) and "sets expert" not in printed


@forked("megatron", WORLD_SIZE="4")
def test_a_feature_that_megatrons_validation_rules_out_takes_its_arguments_back():
    """What it set is undone, and Megatron derives everything as if it had never been asked for."""
    from dataclasses import replace

    import_adaptor()
    own = runtime.catalogue()["moe_tp_extend_ep"]

    def condition(context):
        # Something that only stands in the arguments once Megatron has validated them.
        return ["too late"] if context.arg("data_parallel_size") else list(own.condition(context))

    runtime.catalogue()._features["moe_tp_extend_ep"] = replace(own, condition=condition)
    found, wanted = both_ways((*MOE, "--moe-tp-extend-ep"), MOE)
    assert found == wanted and found["expert_model_parallel_size"] == "2"
    counted_plans(calls := [])
    validated(*MOE, "--moe-tp-extend-ep")
    assert calls.count(True) == 2
    assert (entry("moe_tp_extend_ep").status, entry("moe_tp_extend_ep").reasons) == ("skipped", ["too late"])


def counted_plans(calls):
    """Count the plans from now on: True for one that looks at targets, False for conditions alone."""
    make = runtime.make_plan

    def make_plan(*args, **keywords):
        calls.append(keywords["fingerprints"] is not None)
        return make(*args, **keywords)

    runtime.make_plan = make_plan


@forked("megatron")
def test_the_plan_is_made_once():
    import_adaptor()
    counted_plans(calls := [])
    for flags, conditions in (
        ((), 0),
        (("--use-fused-rmsnorm",), 0),
        (("--use-flash-attn",), 2),
        (("--mindspeed-lite-auto",), 2),
    ):
        calls.clear()
        validated(*flags)
        assert calls == [False] * conditions + [True]


@forked("megatron")
def test_errors_of_ours_are_of_one_kind_and_removing_the_hooks_restores_them():
    from megatron.training import arguments, yaml_arguments

    names = ("add_megatron_arguments", "parse_args", "validate_args")
    before = [getattr(arguments, name) for name in names]
    own_yaml = yaml_arguments.validate_yaml
    adaptor = import_adaptor()
    assert all(map(is_swapped, [*before, own_yaml]))
    hooked = [arguments.parse_args.__code__, *in_force()]
    adaptor.install()
    assert [arguments.parse_args.__code__, *in_force()] == hooked, "again is no change"
    assert issubclass(OptionError, EngineError) and issubclass(PlanError, EngineError)
    adaptor.remove()
    assert [getattr(arguments, name) for name in names] == before and not any(map(is_swapped, [*before, own_yaml]))
    assert all(each.feature.startswith("device_") for each in in_force()) and yaml_arguments.validate_yaml is own_yaml
    adaptor.remove()
    adaptor.install()
    assert is_swapped(arguments.parse_args)


@forked("megatron")
def test_keys_of_mindspeed_in_a_yaml_file_are_one_line_or_a_notice(tmp_path):
    from mindspeed_lite.engine import OptionError

    import_adaptor()
    flags = ("--yaml-cfg", yaml_file(tmp_path, "norm_topk_prob: true\nuse_mc2: false\n"))
    _, printed = validated(*flags, plain=[])
    assert "--norm-topk-prob is left out" in " ".join(printed.split()) and "--use-mc2" not in printed
    with pytest.raises(OptionError) as refused:
        validated("--yaml-cfg", yaml_file(tmp_path, "use_mc2: true\nauto_settings: true\n"), plain=[])
    text = str(refused.value)
    assert "--use-mc2 is read as --use-ascend-mc2" in text and "--auto-settings (done" in text and "\n" not in text
