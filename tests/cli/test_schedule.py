"""`mindspeed-lite schedule`: which order a command runs, orders side by side, pictures, JSON, traces."""

from __future__ import annotations

import json

import pytest

from mindspeed_lite import cli
from mindspeed_lite.pipeline.costs import uniform
from mindspeed_lite.pipeline.orders import PipelineShape, build
from mindspeed_lite.pipeline.simulate import simulate
from mindspeed_lite.planner import ranks, read
from mindspeed_lite.planner.order_candidates import OrderBuilder, OrderFlags, flags
from mindspeed_lite.planner.pipeline_costs import constant_bytes, flops, model_stages
from tests.harness import traces
from tests.harness.commands import python

MODEL = (
    "--num-layers 8 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 4 --seq-length 256 "
    "--max-position-embeddings 256 --micro-batch-size 1 --global-batch-size 8 --bf16 --swiglu --normalization RMSNorm "
    "--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights --hidden-dropout 0 "
    "--attention-dropout 0 --tokenizer-type NullTokenizer --vocab-size 2047 --use-flash-attn"
).split()
FOUR = ["--pipeline-model-parallel-size", "4"]
COMMAND = ["torchrun", "--nproc-per-node", "4", "pretrain_gpt.py", *MODEL, *FOUR]
TWO_CHUNKS = "--num-virtual-stages-per-pipeline-rank 2"


def run(capsys, *options, flags=""):
    code = cli.main(["schedule", *map(str, options), "--", *COMMAND, *flags.split()])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("", "1f1b"),
        (TWO_CHUNKS, "interleaved"),
        (f"{TWO_CHUNKS} --overlap-moe-expert-parallel-comm --delay-wgrad-compute", "interleaved-overlap"),
        ("--schedules-method dualpipev --gradient-accumulation-fusion", "dualpipev"),
        ("--schedules-method dualpipev", "dualpipev-whole"),
        ("--schedules-method=dualpipev --dualpipev-dw-detach", "dualpipev-dw-detach"),
        ("--pipeline-schedule zb-h1", "zb-h1"),
        ("--pipeline-schedule zb-auto --pipeline-schedule-max-live 5", "zb-auto"),
        (f"{TWO_CHUNKS} --recompute-in-bubble", "interleaved+recompute-in-bubble"),
        (
            f"{TWO_CHUNKS} --recompute-in-advance --recompute-granularity full --recompute-method uniform",
            "interleaved+recompute-in-advance",
        ),
    ],
)
def test_the_order_is_the_one_that_the_flags_choose(flags, name, capsys):
    code, out, err = run(capsys, flags=flags)
    assert (code, err) == (0, "")
    chunks = "1 model chunk" if name in ("1f1b", "zb-h1", "zb-auto") else "2 model chunks"
    assert out.startswith(f"{name}: 4 pipeline ranks, {chunks} each, 8 micro-batches\n")


def test_figures_of_1f1b_are_those_of_the_formula_and_of_the_memory_command(tmp_path, capsys):
    file = tmp_path / "schedule.json"
    code, out, _ = run(capsys, "--times", "10,8,6", "--json", file, "--steps")
    assert code == 0 and "fastest" not in out
    (order,) = json.loads(file.read_text())["orders"]
    training = read([*MODEL, *FOUR], 4)
    # Ranks differ in their operations by the output layer alone; --times are of an average rank.
    work = [flops(training, chunk) for chunk in model_stages(training, 1)]
    times = [
        [getattr(each, name) * 4 * milliseconds / 1000 / sum(getattr(one, name) for one in work) for each in work]
        for name, milliseconds in (("forward", 10), ("input_grad", 8), ("weight_grad", 6))
    ]
    last = sum(each[-1] for each in times)
    assert order["step"] == pytest.approx(8 * last + 3 * sum(each[0] for each in times))
    predicted = ranks(training)
    for rank, each in enumerate(order["ranks"]):
        assert each["peak_live"] == predicted[rank].kept == 4 - rank
        assert each["constant_bytes"] + each["activation_bytes"] == pytest.approx(predicted[rank].total, rel=1e-9)
        assert each["entries"][0]["steps"] == ["F0:0"]


def test_orders_are_compared_and_the_fastest_that_fits_is_named(tmp_path, capsys):
    file = tmp_path / "schedule.json"
    code, out, _ = run(capsys, "--order", "all", "--times", "10,10,10,0.5", "--json", file)
    assert code == 0
    found = json.loads(file.read_text())
    names = [each["name"] for each in found["orders"]]
    assert names[0] == "1f1b" and {"zb-h1", "zb-auto", "zbv-auto", "dualpipev", "interleaved"} <= set(names)
    assert "recompute-granularity full" in found["not_applicable"]["interleaved+recompute-in-advance"]
    fastest = min(found["orders"], key=lambda each: each["step"])
    assert found["fastest"] == fastest["name"] and f"fastest: {fastest['name']}" in out
    least = min(found["orders"], key=lambda each: each["peak_bytes"])
    tight = (least["peak_bytes"] + 1) / 1e9
    code, out, _ = run(capsys, "--order", "1f1b,zb-h1,interleaved,dualpipev", "--memory", f"{tight:.12f}GB")
    assert code == 0 and f"B: {least['name']}" in out
    code, out, _ = run(capsys, "--memory", "0.0001")
    assert code == 1 and "no order fits within 100 kB" in out


RUNNABLE = "1f1b interleaved interleaved-overlap zb-h1 zb-auto dualpipev dualpipev-whole dualpipev-dw-detach"


@pytest.mark.parametrize("order", [*RUNNABLE.split(), "interleaved+recompute-in-bubble"])
def test_the_flags_to_paste_run_the_order(order):
    words = [*MODEL, *FOUR]
    found = OrderBuilder(read(words, 4)).compare(order)[0][-1]
    read_again = OrderFlags.read([*words, *flags(found)])
    assert read_again.order(read(read_again.rest, 4)) == order
    if order == "zb-auto":
        assert read_again.max_live == found.peak_live


def test_the_screen_ends_with_the_flags_of_the_fastest(capsys):
    _, out, _ = run(capsys, "--order", "zb-h1")
    assert out.endswith("in place of the command's own for its order:\n  --pipeline-schedule zb-h1\n")
    _, out, _ = run(capsys, "--order", "1f1b,zbv-auto")
    assert "zbv-auto is only simulated" in out
    _, out, _ = run(capsys, "--order", "1f1b", flags="--pipeline-schedule zb-h1")
    assert out.endswith("fastest: zb-h1, the order of the command\n")


def test_own_orders_pictures_and_traces(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    own, trace, picture = tmp_path / "own.py", tmp_path / "steps.jsonl", tmp_path / "schedule.png"
    own.write_text("from mindspeed_lite.pipeline.orders import zb_h1 as mine\n")
    ran = simulate(build("zb-h1", PipelineShape(4, 8)), uniform(4, 0.01, 0.01, 0.01))
    with trace.open("w") as file:
        for rank, entries in enumerate(ran.ranks):
            for each in entries:
                step = {"rank": rank, "kind": each.entry.kind.value, "chunk": 0, "microbatch": each.entry.microbatch}
                print(json.dumps({**step, "begin": each.begin, "end": each.end}), file=file)
    code, out, err = run(capsys, "--trace", trace, "--png", picture, flags=f"--pipeline-schedule {own}:mine")
    assert (code, err) == (0, "")
    assert "executed in this order, last training step: 270.0 ms, idle 11.1 %" in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    code, out, err = run(capsys, "--trace", trace)
    assert code == 2 and "where 1f1b has" in err and out == ""


def test_it_needs_no_torch():
    code = (
        "import json, sys\nfrom mindspeed_lite.cli import main\nfrom mindspeed_lite.planner import traces\n"
        f"traces.known.update(json.load(open({str(traces.FILE)!r})))\n"
        f"code = main({['schedule', '--order', 'all', '--', *COMMAND]!r})\n"
        "assert not {'torch', 'megatron', 'matplotlib'} & set(sys.modules)\nsys.exit(code)\n"
    )
    ran = python("-c", code)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    ("ranks", "name", "words", "is_one"),
    [
        (4, "interleaved", [], True),
        (4, "interleaved", ["--optimize-send-recv-comm"], False),
        # Between two ranks single messages have a group for each sender, batches have one.
        (2, "interleaved", [], False),
        (2, "interleaved", ["--no-overlap-p2p-communication"], True),
        (2, "1f1b", [], True),
        (2, "zb-h1", [], False),
    ],
)
def test_messages_of_one_group_have_one_queue(ranks, name, words, is_one):
    built = build(name, PipelineShape(ranks, 8, 2 if name == "interleaved" else 1))
    assert OrderFlags.read(words).has_one_queue(built) is is_one


def test_operations_are_two_for_each_weight_and_token_and_attentions_own():
    training = read([*MODEL, "--pipeline-model-parallel-size", "2"], 2)
    first, last = (flops(training, chunk) for chunk in model_stages(training, 1))
    layer = 4 * 128 * 128 + 3 * 128 * 384
    attention = 256 * 256 * 128 * 2
    assert first.forward == 4 * (2 * 256 * layer + attention)
    assert first.weight_grad == first.forward - 4 * attention
    assert first.input_grad == first.forward + 4 * attention
    assert last.forward - first.forward == 2 * 256 * 128 * training.padded_vocab_size


def test_on_the_v_placement_the_first_rank_has_embedding_and_loss():
    training = read([*MODEL, *FOUR], 4)
    straight = constant_bytes(training, ((0,), (1,), (2,), (3,)))
    v = constant_bytes(training, ((0, 7), (1, 6), (2, 5), (3, 4)))
    assert sum(straight) == sum(v) and v[0] == max(v) and v[1] == v[2] == v[3] == straight[1]
