"""What an executed pipeline schedule waits for, with layers that sleep."""

from __future__ import annotations

from pathlib import Path

from tests.harness.commands import python

ROOT = Path(__file__).resolve().parents[2]


def test_weight_gradients_run_while_a_zero_bubble_schedule_would_wait() -> None:
    """Where a send holds up the next step until the other rank receives, zb-h1 waits longer than 1F1B."""
    ran = python(
        *["-m", "benchmarks.pipeline_prediction", "--orders", "1f1b", "zb-h1", "--layer", "20"],
        cwd=ROOT,
        path=[ROOT],
        timeout=200,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = [line.split("|") for line in ran.stdout.splitlines() if line.startswith("| `")]
    recorded = {row[1].strip(" `"): float(row[6].strip(" %")) for row in rows}
    assert recorded["zb-h1"] < recorded["1f1b"]
