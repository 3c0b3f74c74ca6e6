"""MindSpeed's flags on their way through Megatron's own parser, and the end of a command line that has an error."""

from __future__ import annotations

import contextlib
import io
import sys

import pytest

from tests.harness.processes import forked

PLAIN = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 2 --lr 1e-3 --train-iters 3 --bf16 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 255 --normalization RMSNorm"
).split()


def parsed(*flags, **keywords):
    import mindspeed_lite.megatron_adaptor  # noqa: F401, I001
    from megatron.training import arguments

    sys.argv = ["pretrain.py", *PLAIN, *flags]
    given = list(sys.argv)
    args = arguments.parse_args(**keywords)
    assert sys.argv == given
    return args


def ends(*flags, **keywords):
    """What is printed on stderr when the command line is refused."""
    with contextlib.redirect_stderr(io.StringIO()) as errors, pytest.raises(SystemExit) as ending:
        parsed(*flags, **keywords)
    assert ending.value.code == 2
    return errors.getvalue().splitlines()


@forked("megatron", COLUMNS="200")
def test_a_mindspeed_flag_works_and_the_report_says_so_once():
    from megatron.training import arguments

    args = parsed(
        "--use-mc2", "--gemm-gradient-accumulation-fusion", "--no-gradient-accumulation-fusion", "--norm-topk-prob",
        "--transformer-impl", "transformer_engine", "--context-parallel-algo", "ulysses_cp_algo", "--smart-swap",
    )  # fmt: skip
    assert args.use_ascend_mc2 and args.gradient_accumulation_fusion and args.transformer_impl == "local"
    assert not hasattr(args, "norm_topk_prob")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        arguments.validate_args(args)
    text = " ".join(printed.getvalue().split())
    for each in ("--use-mc2 is read as --use-ascend-mc2", "--norm-topk-prob is left out", "--smart-swap (done"):
        assert text.count(each) == 1, each
    assert "--transformer-impl local set" not in text


@forked("megatron")
def test_every_error_at_once_and_no_wall_of_usage():
    assert ends("--auto-settings", "--use-flas-attn", "3", "--num_layers", "4", "--auto-settings-type", "black") == [
        "pretrain.py: error: --auto-settings (done another way): search parallel layout and micro-batch by "
        "profiling short runs. Instead: choose the layout with `mindspeed-lite plan`",
        "pretrain.py: error: --auto-settings-type (done another way): white: model only; black: run each "
        "candidate; mixed: run the model's best. Instead: choose the layout with `mindspeed-lite plan`",
        "pretrain.py: error: unrecognized argument --use-flas-attn: did you mean --use-flash-attn?",
        "pretrain.py: error: unrecognized argument --num_layers: did you mean --num-layers?",
    ]
    assert ends("--use-flas-attn")[-1].endswith("unrecognized argument --use-flas-attn: did you mean --use-flash-attn?")
    assert ends("--train-iters", "many") == ["pretrain.py: error: argument --train-iters: invalid int value: 'many'"]
    assert ends("--quant-states", "hif8")[0].startswith("pretrain.py: error: --quant-states hif8 (outside")
    assert len(ends("--mindspeed-lite-strict", "--smart-swap")) == 1


@forked("megatron")
def test_the_scripts_own_flags_and_its_wish_to_ignore_others_count():
    def extra(parser):
        parser.add_argument("--first-k-dense-replace", type=int)
        parser.add_argument("--auto-settings", action="store_true")
        return parser

    args = parsed("--first-k-dense-replace", "3", "--auto-settings", extra_args_provider=extra)
    assert args.first_k_dense_replace == 3 and args.auto_settings
    from megatron.training import arguments

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        args = parsed("--auto-settings", "--no-such-flag", "1", ignore_unknown_args=True)
        arguments.validate_args(args)
    assert "(ignored: this script ignores unknown flags)" in " ".join(printed.getvalue().split())


@forked("megatron")
def test_after_removal_megatron_parses_alone():
    parsed("--norm-topk-prob")
    import mindspeed_lite.megatron_adaptor as adaptor

    adaptor.remove()
    from megatron.training import arguments

    sys.argv = ["pretrain.py", *PLAIN, "--norm-topk-prob"]
    with contextlib.redirect_stderr(io.StringIO()) as errors, pytest.raises(SystemExit):
        arguments.parse_args()
    assert "usage: pretrain.py" in errors.getvalue()
