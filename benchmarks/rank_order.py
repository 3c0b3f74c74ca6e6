"""A step before and after `mindspeed-lite run --rank-order`, on hosts of which two have a slow link. Needs root."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.harness import Benchmark, Options, Row
from mindspeed_lite.bench.wording import percent, seconds

HOSTS = 4
_COMMAND = "mindspeed_lite links --json"
_LAYOUT = (
    "pretrain_gpt.py --num-layers 2 --num-attention-heads 4 --seq-length 32 --vocab-size 256 --swiglu --bf16 "
    "--make-vocab-size-divisible-by 1 --disable-bias-linear --normalization RMSNorm --position-embedding-type rope "
    f"--untie-embeddings-and-output-weights --micro-batch-size 2 --global-batch-size {2 * HOSTS}"
)


def _train(hidden: int, steps: int) -> None:
    """As each rank: print the seconds of a step."""
    import torch.distributed as dist

    from tests.harness import core_loop

    dist.init_process_group("gloo")
    config = {"hidden_size": hidden, "ffn_hidden_size": 4 * hidden}
    training = core_loop.Training({"layers": 2, "micro_batches": 1, "config": config})
    times = []
    for _ in range(steps + 1):
        dist.barrier()
        began = time.perf_counter()
        training.step()
        times.append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        print(f"a step: {median(times[1:])} s", flush=True)


def _on_hosts(options: Options, words: str) -> str:
    lab = [sys.executable, "-m", "lab.namespaces", "--hosts", str(HOSTS), "--rate", str(options.rate)]
    command = [*lab, "--slow", f"0:1:{options.slow}", "--", sys.executable, "-m", *words.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr[-500:]}")
    return done.stdout


def measure(options: Options) -> list[Row]:
    times: dict[str, list[float]] = {"as launched": [], "proposed": []}
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/links.json"
        sizes = f"--hidden-size {options.hidden} --ffn-hidden-size {4 * options.hidden}"
        _on_hosts(options, f"{_COMMAND} {file} -- {_LAYOUT} {sizes}")
        found = json.loads(Path(file).read_text())
        for _ in range(options.repeats):
            for arm, order in (("as launched", ""), ("proposed", f"--rank-order {file} ")):
                train = f"-m benchmarks.rank_order --train {options.hidden} {options.steps}"
                shown = _on_hosts(options, f"mindspeed_lite run {order}{train}")
                times[arm].append(float(re.findall(r"a step: (\S+) s", shown)[-1]))
    named = [f"{each['kind']} {', '.join(each['names'])}" for each in found["slow"] if each["what"] == "bandwidth"]
    before, after = (median(each) for each in times.values())
    predicted = found["seconds"][0] - found["seconds"][1]
    return [
        {
            "slow": "; ".join(named), "order": ",".join(map(str, found["order"])), "before": before, "after": after,
            "measured": before - after, "predicted": predicted, "error": predicted / (before - after) - 1,
        }
    ]  # fmt: skip


BENCHMARK = Benchmark(
    name="rank_order",
    title="Ranks in the order of their links",
    about=f"A GPT with 2 layers and hidden size {{hidden}}, data-parallel on {HOSTS} network namespaces with links of "
    "{rate} Mbit/s, one of them {slow}. `mindspeed-lite links` names it and proposes the order.",
    columns={
        "Named": lambda row: row["slow"],
        "Order": lambda row: row["order"],
        "Step as launched": lambda row: seconds(row["before"]),
        "Step in this order": lambda row: seconds(row["after"]),
        "Gain": lambda row: seconds(row["measured"]),
        "Predicted gain": lambda row: seconds(row["predicted"]),
        "Error": lambda row: percent(row["error"]),
    },
    measure=measure,
    options={"rate": 400, "slow": 50, "hidden": 256, "steps": 5, "repeats": 2},
    tiny={"rate": 400, "slow": 50, "hidden": 64, "steps": 1, "repeats": 1},
)

if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        _train(*map(int, sys.argv[2:]))
    else:
        sys.exit(BENCHMARK.main())
