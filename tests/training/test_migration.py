"""Launch scripts as MindSpeed-LLM ships them: flags untouched, small sizes, nothing lost in silence."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from mindspeed_lite.migration import translate
from tests.harness.training import SCRIPT, Trainer

# The flags of the launch scripts, values of sizes left out: "N". Sizes here are small, data and tokenizer mock ones.
TABLE = Path(__file__).parents[2] / "docs" / "mindspeed_llm_scripts.tsv"
SCRIPTS = ("qwen3_moe/pretrain_qwen3_30b_a3b_4K_ptd", "deepseek3/pretrain_deepseek3_671b_4k_ptd",
           "deepseek2_lite/pretrain_deepseek2_lite_16b_ptd_8p")  # fmt: skip
SIZES = {
    "--num-layers": "4", "--hidden-size": "64", "--ffn-hidden-size": "128", "--num-attention-heads": "4",
    "--num-query-groups": "2", "--kv-channels": "32", "--num-experts": "8", "--moe-router-topk": "4",
    "--moe-ffn-hidden-size": "32", "--moe-shared-expert-intermediate-size": "32", "--moe-router-num-groups": "4",
    "--moe-router-group-topk": "2", "--q-lora-rank": "48", "--kv-lora-rank": "32", "--qk-head-dim": "32",
    "--qk-pos-emb-head-dim": "16", "--v-head-dim": "32", "--seq-length": "64", "--max-position-embeddings": "64",
    "--global-batch-size": "4", "--train-iters": "3", "--lr-decay-iters": "3", "--lr": "1e-3", "--min-lr": "1e-5",
    "--noop-layers": "3", "--first-k-dense-replace": "1", "--attention-dropout": "0", "--hidden-dropout": "0",
    "--init-method-std": "0.02", "--adam-beta1": "0.9", "--adam-beta2": "0.95", "--lr-warmup-fraction": "0.01",
    "--initial-loss-scale": "4096", "--norm-epsilon": "1e-6", "--rotary-base": "10000", "--clip-grad": "1.0",
    "--eval-interval": "2000", "--save-interval": "2000", "--eval-iters": "0", "--pipeline-model-parallel-size": "1",
    "--rope-scaling-factor": "40", "--rope-scaling-original-max-position-embeddings": "4096", "--num-workers": "0",
}  # fmt: skip
PATHS = ("--load", "--save", "--data-path", "--tokenizer-name-or-path", "--num-layers-per-virtual-pipeline-stage")
MOCK = "--mock-data --tokenizer-type NullTokenizer --vocab-size 255 --padded-vocab-size 256".split()


def shrunk(name: str) -> list[str]:
    lines = dict(line.split("\t") for line in TABLE.read_text(encoding="utf-8").splitlines())
    words = []
    for flag, *values in (each.split() for each in re.split(r" (?=--)", lines[f"{name}.sh"])):
        if flag not in PATHS:
            words += [flag, *([SIZES[flag]] if flag in SIZES else ["1" if value == "N" else value for value in values])]
    return words


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_shipped_script_starts(trainer: Callable[[str], Trainer], name: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    given = shrunk(name)
    argv = [SCRIPT, *given, *MOCK, "--mindspeed-lite-report", str(report)]
    result = trainer("0.19.2").run(entry="script", arm="adaptor", nproc=1, argv=argv).check()
    losses = result.losses()
    assert len(losses) == 3 and all(0 < loss < 7 for loss in losses)
    notices = json.loads(report.read_text())["notices"]
    for step in translate(given).steps:
        # What neither Megatron nor a feature of ours has under this name is in the report, once.
        if step.outcome != "kept" and step.use.row.outcome not in ("keep", "rule"):
            found = [text for text in notices if text.partition(" ")[0] == step.use.flag]
            assert len(found) == 1 or step.use.flag == "--moe-permute-fusion", (step.use.flag, notices)
