"""What `--moe-record-load` costs of the step it counts.

On CPU nothing runs asynchronously, so the clock around the recorder's two calls holds all of its time.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import mindspeed_lite
from benchmarks.harness import Benchmark, Options, Row, ms
from lab.ranks import Loopback, Rates, on_ranks
from tests.harness import core_loop

MODELS: dict[str, dict[str, Any]] = {
    "8 experts, top 2": {"experts": 8, "moe": {"moe_ffn_hidden_size": 1024}},
    "64 experts, top 8": {"experts": 64, "moe": {"moe_ffn_hidden_size": 128, "moe_router_topk": 8}},
}


def _timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        before = time.perf_counter()
        found = function(*args)
        seconds.append(time.perf_counter() - before)
        return found

    return run


def _steps(options: Options, model: dict[str, Any], file: str, rates: Rates) -> list[tuple[float, float, float]]:
    """Seconds of each step, of what it counted, and of the message at its end."""
    from mindspeed_lite.patches import moe_record_load as patch

    core_loop.SEQUENCE = options.sequence
    counts: list[float] = []
    ends: list[float] = []
    recorder: Any = patch._Recorder
    recorder.count, recorder.end_step = _timed(recorder.count, counts), _timed(recorder.end_step, ends)
    shape = {"hidden_size": options.hidden, "ffn_hidden_size": 1024, "num_attention_heads": 8, "num_query_groups": 8}
    with mindspeed_lite.enabled(moe_record_load=file, moe_record_load_interval=options.interval, strict=True):
        training = core_loop.Training({"ep": 2, "layers": 2, "micro_batches": 2, **model, "config": shape})
        found = []
        for _ in range(options.steps + 1):
            counts.clear()
            before = time.perf_counter()
            training.step()
            found.append((time.perf_counter() - before, sum(counts), ends[-1]))
    return found[1:]


def _measure(options: Options) -> list[Row]:
    rows = []
    for model, sizes in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            found = on_ranks(2, Loopback(), partial(_steps, options, sizes, f"{folder}/load"))
        steps, counts, ends = zip(*found, strict=True)
        shares = [count / step for count, step in zip(counts, steps, strict=True)]
        rows.append({
            "model": model, "step": median(steps), "counting": median(counts), "share": median(shares),
            "message": sum(ends) / (options.steps / options.interval), "of all": sum(ends) / sum(steps),
        })  # fmt: skip
    return rows


BENCHMARK = Benchmark(
    name="moe_record_load",
    title="Cost of recording the load of experts",
    about="Two processes, expert parallel; medians of {steps} steps. A message every {interval} steps, with the wait "
    "for the other rank and the file.",
    columns={
        "model": lambda row: row["model"],
        "step": lambda row: ms(row["step"]),
        "counting": lambda row: f"{1e3 * row['counting']:.2f} ms",
        "share of a step": lambda row: f"{row['share']:.2%}",
        "message": lambda row: ms(row["message"]),
        "share of its steps": lambda row: f"{row['of all']:.2%}",
    },
    measure=_measure,
    options={"steps": 20, "interval": 10, "sequence": 512, "hidden": 512},
    tiny={"steps": 2, "interval": 1, "sequence": 32, "hidden": 64},
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
