"""Files that users may have damaged: a command accepts one with finite results, or says in one line what is wrong."""

from __future__ import annotations

import json
import math
import random
import re
import struct

import pytest

from mindspeed_lite import cli, json_file
from mindspeed_lite.parallel.balance import record
from mindspeed_lite.pipeline.costs import uniform
from mindspeed_lite.pipeline.orders import PipelineShape, build
from mindspeed_lite.pipeline.simulate import simulate
from mindspeed_lite.planner import ArgumentError, calibrated, links
from mindspeed_lite.planner.slow_parts import slow_parts
from mindspeed_lite.planner.work import CollectiveCall, Group, Product, Scores, Vector

MUTATIONS = 120
# Texts that take the place of a value.
VALUES = [
    *"null true false NaN Infinity -Infinity 1e999 -1e308 1e308 5e-324 0 -0.0 -1 2 1e9 18446744073709551616".split(),
    *'"" "x" "nan" "1" [] {} [null] [[1]] {"a":1} {"a":1,"a":2} "\\ud800" "\\u0000" "\\u001b[31m"'.split(),
    *("9" * 400, "9" * 5000, "[" * 20_000, '{"a":' * 20_000, '"' + "x" * 20_000 + '"'),
]
NOISE = ("\x00", "\xff", "}", '"', ",", "\ufeff", "\n", " ", "9", "-")
SMALL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --global-batch-size 4 --bf16".split()
PIPELINE = "torchrun --nproc-per-node 2 pretrain_gpt.py --pipeline-model-parallel-size 2 --micro-batch-size 1".split()


def places(value):
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(each, (dict, list)):
            yield from places(each)


def mutated(chance, document):
    """The text of a document with one value, key or stretch of text that is another."""
    kind = chance.choice(("value", "value", "value", "value", "lost", "other key", "twice", "text", "cut"))
    if kind in ("text", "cut"):
        at = chance.randrange(len(document))
        return document[:at] + (chance.choice(NOISE) + document[at + chance.randrange(3) :] if kind == "text" else "")
    marked = json.loads(document)
    holder, key = chance.choice(list(places(marked)))
    if kind == "value":
        holder[key] = "MARK"
        return json.dumps(marked).replace('"MARK"', chance.choice(VALUES), 1)
    if kind == "lost":
        del holder[key]
    elif isinstance(holder, list):
        holder.insert(key, holder[key])
    elif kind == "other key":
        holder[f"{key} "] = holder.pop(key)
    else:
        return json.dumps(marked).replace(f'"{key}":', f'"{key}": 1, "{key}":', 1)
    return json.dumps(marked)


def mutated_lines(chance, lines):
    """One line of a file is another, stands twice, or is gone."""
    lines, at = [*lines], chance.randrange(len(lines))
    lines[at : at + 1] = chance.choice(([mutated(chance, lines[at])],) * 8 + ([lines[at]] * 2, []))
    return "\n".join(lines) + "\n"


def mutated_bytes(chance, data):
    at = chance.randrange(len(data))
    noise = struct.pack("<q", chance.choice((0, -1, 1, 2**31, 2**40, 2**62)))[: chance.choice((1, 4, 8))]
    return data[:at] + chance.choice((noise + data[at + len(noise) :], b"", data[at + 1 :], noise + data[at:]))


def finite(value):
    if isinstance(value, (dict, list, tuple)):
        return all(map(finite, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, float) or math.isfinite(value)


def command(*words):
    """Whether a command line takes the file; it writes JSON, or says what is wrong."""

    def run(file, capsys):
        out = file.with_name("out.json")
        out.unlink(missing_ok=True)
        code = cli.main([each.format(file=file, out=out) for each in words])
        shown = capsys.readouterr()
        if code == 2:
            assert shown.out == "" and shown.err.count("\n") == 1, shown
            assert ": error: " in shown.err and str(file) in shown.err, shown.err
            return False
        assert code in (0, 1) and shown.err == "", shown
        assert not re.search(r"\b(nan|inf)\b", shown.out), shown.out
        assert finite(json.loads(out.read_text()))
        return True

    return run


def function(use):
    """Whether a function takes the file; its results are finite."""

    def run(file, capsys):
        try:
            assert finite(use(file))
        except (json_file.JsonFileError, ArgumentError) as error:
            assert str(file) in str(error) and "\n" not in str(error) and str(error).isprintable(), error
            return False
        return True

    return run


def prices(file):
    found, asked = calibrated.read(file), []
    for call in (
        lambda: found.product(Product(256, 128, 64), "forward", 2),
        lambda: found.scores(Scores(1, 256, 256, 4, 64, 64, 1.0, True), False, 2),
        lambda: found.vector(Vector("norm", 1e6), False, 2),
        lambda: found.message(CollectiveCall("all_reduce", 3e6, Group(4))),
        lambda: found.optimizer(1e6, False),
    ):
        try:
            asked.append(call())
        except ArgumentError as error:
            assert "the calibration holds no" in str(error)
    return [*asked, *found.overheads, found.shared(1.0, 1.0, 4), found.overlap]


def samples():
    keys = {("product", "forward", "2"): 3, ("flash", "forward", "2"): 2, ("norm", "plain", "forward", "2"): 1}
    for key, size in {**keys, ("optimizer", "plain"): 1}.items():
        for scale in (1, 8):
            yield {"key": key, "shape": [64.0 * scale] * size, "work": 1e6 * scale, "seconds": 1e-4 * scale}


CALIBRATION = json.dumps(
    {
        "format": calibrated.FORMAT, "date": "x", "device": "d", "kind": "cpu", "cores": 2, "ranks_per_node": 2,
        "overlap": 0.0, "operators": {"1": [*samples()], "2": [*samples()]},
        "collectives": [
            {"kind": "all_reduce", "ranks": 2, "bytes": size, "seconds": 1e-4 * place, "width": 4}
            for place, size in enumerate((1024, 4096, 1 << 20), 1)
        ],
        "overheads": {"layer": 1e-4, "microbatch": 1e-4, "step": 1e-3},
    }
)  # fmt: skip
RATES = [[1e9 * (i != j) for j in range(4)] for i in range(4)]
LINKS = json.dumps(
    {
        "format": links.FORMAT, "hosts": ["a", "a", "b", "b"], "bandwidth": RATES, "latency": [[1e-5] * 4] * 4,
        "compute": [1e-3] * 4, "order": [2, 3, 0, 1], "seconds": [2.0, 1.0],
        "groups": [{"kind": "all_reduce", "size": 4, "stride": 1, "bytes_per_second": 1e8}],
    }
)  # fmt: skip


def measured(file):
    found = links.read(file)
    kinds = ("all_reduce", "all_to_all", "send")
    times = [found.message(CollectiveCall(kind, 3e6, Group(2, stride))) for kind in kinds for stride in (1, 2)]
    return [*times, *(each.factor for each in slow_parts(found)), links.fast_block(found)]


INDEX = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 4, 8, 9) + struct.pack("<8i", *range(3, 11)) + bytes(136)


def load_lines():
    header = record.LoadHeader(experts=4, topk=2, expert_parallel=2, replicas=1, decoder_layers=2, layers=(2, 3))
    yield json.dumps({"format": record.FORMAT, "version": record.VERSION, **vars(header)})
    for number in (1, 2, 3):
        experts = [[4, 0, 2, 2], [2, 2, 2, number]]
        ranks = [[sum(row[:2]), sum(row[2:])] for row in experts]
        yield json.dumps({"step": number, "tokens": [4, 4], "experts": experts, "ranks": ranks})


def trace_lines():
    ran = simulate(build("1f1b", PipelineShape(2, 4)), uniform(2, 0.01, 0.01, 0.01))
    for rank, entries in enumerate(ran.ranks):
        for each in entries:
            step = {"rank": rank, "kind": each.entry.kind.value, "chunk": 0, "microbatch": each.entry.microbatch}
            yield json.dumps({**step, "begin": each.begin, "end": each.end})


KINDS = {
    "balance": (mutated_lines, [*load_lines()], command("balance", "{file}", "--json", "{out}")),
    "trace": (mutated_lines, [*trace_lines()], command(
        "schedule", "--trace", "{file}", "--json", "{out}", "--", *PIPELINE, *SMALL, "--vocab-size", "512")),
    "calibration": (mutated, CALIBRATION, function(prices)),
    "links": (mutated, LINKS, function(measured)),
    "index": (mutated_bytes, INDEX, command("balance", "{file}", "--json", "{out}", "--seq-length", "16",
        "--ranks", "2", "--global-batch-size", "4", "--steps", "2")),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_one_line_or_finite_results(tmp_path, capsys, kind):
    mutate, sound, run = KINDS[kind]
    file, chance, taken = tmp_path / ("file.idx" if kind == "index" else "file"), random.Random(kind), 0
    for number in range(MUTATIONS + 1):
        data = mutate(chance, sound) if number else "\n".join(sound) if isinstance(sound, list) else sound
        if isinstance(data, str):
            is_latin = number and chance.random() < 0.1
            data = data.encode(*(("latin-1", "replace") if is_latin else ("utf-8", "surrogatepass")))
        file.write_bytes(data)
        try:
            taken += run(file, capsys)
        except (Exception, SystemExit) as error:
            raise AssertionError(f"mutation {number}: {data[:2000]!r}") from error
        assert taken or number, "the file as it was"
    assert 1 < taken < 0.9 * MUTATIONS


def test_a_plan_by_a_damaged_calibration_names_the_value(tmp_path, capsys):
    file = tmp_path / "calibration.json"
    plan = f"plan --devices 1 --memory 1 --calibration {file} -- pretrain_gpt.py --micro-batch-size 1 --vocab-size 512"
    for before, after, words in (
        ('"work": 1000000.0', '"work": NaN', 'operators["1"][0].work: want units of work, at least 1, not NaN'),
        ('"ranks": 2', '"ranks": 1', "collectives[0].ranks: want a number of processes, at least 2, not 1"),
        ('"overheads"', '"overheads": ' + "[" * 20_000 + ', "overheads"', "is nested too deeply"),
    ):
        file.write_text(CALIBRATION.replace(before, after, 1))
        assert cli.main([*plan.split(), *SMALL]) == 2
        shown = capsys.readouterr().err
        assert shown.count("\n") == 1 and words in shown and "calibrate` again" in shown, shown
