"""What `--moe-record-load` costs beside the step it counts: `python -m benchmarks.moe_record_load`.

    python -m benchmarks.moe_record_load [--steps 20] [--interval 10]

Two processes on gloo train a loop on Megatron-core with experts over both; on CPU nothing runs behind the host, so that
the clock around the recorder's two calls holds all of its time. A step with it and one without differ by less than
steps differ among each other, so that the share is taken within each step. The message's time is that of rank 0, with
the wait for the other rank and the file.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import mindspeed_lite
from tests.harness import checkouts, core_loop
from tests.harness.training import Trainer

SEQUENCE = 512
MODELS: dict[str, dict[str, Any]] = {
    "8 experts, top 2": {"experts": 8, "moe": {"moe_ffn_hidden_size": 1024}},
    "64 experts, top 8": {"experts": 64, "moe": {"moe_ffn_hidden_size": 128, "moe_router_topk": 8}},
}
_SHAPE = {"hidden_size": 512, "ffn_hidden_size": 1024, "num_attention_heads": 8, "num_query_groups": 8}


def _timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        before = time.perf_counter()
        found = function(*args)
        seconds.append(time.perf_counter() - before)
        return found

    return run


def _rank(out: str, name: str, steps: int, interval: int) -> None:
    """One process: seconds of each step, of what it counted, and of its end."""
    import torch.distributed as dist

    from mindspeed_lite.patches import moe_record_load as patch

    dist.init_process_group("nccl")
    core_loop.SEQUENCE = SEQUENCE
    counts: list[float] = []
    ends: list[float] = []
    recorder: Any = patch._Recorder
    recorder.count, recorder.end_step = _timed(recorder.count, counts), _timed(recorder.end_step, ends)
    with mindspeed_lite.enabled(moe_record_load=f"{out}/load", moe_record_load_interval=interval, strict=True):
        training = core_loop.Training({"ep": 2, "layers": 2, "micro_batches": 2, **MODELS[name], "config": _SHAPE})
        training.step()
        counts.clear()
        found = []
        for _ in range(steps):
            before = time.perf_counter()
            training.step()
            found.append((time.perf_counter() - before, sum(counts), ends[-1]))
            counts.clear()
    if dist.get_rank() == 0:
        Path(out, "seconds.json").write_text(json.dumps(found))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.moe_record_load")
    parser.add_argument("--steps", type=int, default=20, help="after the first one (default %(default)s)")
    parser.add_argument("--interval", type=int, default=10, help="steps between two messages (default %(default)s)")
    options = parser.parse_args(arguments)
    print("| Model | step | counting | share of a step | message | share of its steps |")
    print("| --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(checkouts.folder(checkouts.installed()), Path(folder), training=False)
        for place, name in enumerate(MODELS):
            out = Path(folder, str(place))
            out.mkdir()
            argv = [__file__, str(out), name, str(options.steps), str(options.interval)]
            trainer.run(entry="script", arm="device", nproc=2, argv=argv, timeout=600).check()
            found = json.loads((out / "seconds.json").read_text())
            step, counting = median(each[0] for each in found), median(each[1] for each in found)
            share = median(each[1] / each[0] for each in found)
            message = sum(each[2] for each in found)
            whole = message / sum(each[0] for each in found)
            print(
                f"| {name} | {1e3 * step:.0f} ms | {1e3 * counting:.2f} ms | {100 * share:.2f} % "
                f"| {1e3 * message / (options.steps / options.interval):.1f} ms | {100 * whole:.2f} % |"
            )
        trainer.close()
    return 0


if __name__ == "__main__":
    if len(sys.argv) == 5 and Path(sys.argv[1]).is_dir():
        _rank(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        sys.exit(main())
