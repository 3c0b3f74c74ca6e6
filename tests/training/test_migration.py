"""Launch scripts as MindSpeed-LLM ships them: flags untouched, small sizes, nothing lost in silence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mindspeed_lite.migration import flags
from tests.harness.training import SCRIPT, Trainer

# Flags of three launch scripts that MindSpeed-LLM ships, each with every flag it has, at sizes that train here. Which
# flags are together is as shipped; numbers of layers, heads, experts, devices and tokens are small, and data and
# tokenizer are mock ones (MOCK), which come last and so win. Paths are left out, and so is --enable-hf2mg-convert.
MOCK = "--mock-data --tokenizer-type NullTokenizer --vocab-size 255 --padded-vocab-size 256".split()

_LENGTHS = (
    "--seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 4 --train-iters 3 "
    "--lr-decay-style cosine --log-interval 1 --save-interval 2000 --eval-interval 2000 --eval-iters 0 --split 100,0,0 "
)
_MODEL = (
    "--use-mcore-models --num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 "
    "--make-vocab-size-divisible-by 1 --untie-embeddings-and-output-weights --disable-bias-linear "
    "--attention-dropout 0.0 --hidden-dropout 0.0 --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--use-rotary-position-embeddings --attention-softmax-in-fp32 --bf16 --distributed-backend nccl "
    "--init-method-std 0.02 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95 --weight-decay 1e-2 "
    "--initial-loss-scale 4096 --lr 1e-3 --min-lr 1e-5 --norm-epsilon 1e-6 --rotary-base 1000000 --no-load-optim "
    "--no-load-rng --tokenizer-type PretrainedFromHF --tokenizer-name-or-path none "
)
_FUSED = (
    "--use-flash-attn --use-fused-rotary-pos-emb --use-fused-swiglu --use-fused-rmsnorm --no-masked-softmax-fusion "
)

LLAMA3_8B = (
    _LENGTHS + _MODEL + _FUSED + "--group-query-attention --num-query-groups 2 --use-distributed-optimizer "
    "--overlap-grad-reduce --overlap-param-gather --no-gradient-accumulation-fusion --reset-attention-mask "
    "--recompute-activation-function --recompute-activation-function-num-layers 1 --tensor-model-parallel-size 1 "
    "--pipeline-model-parallel-size 1 --sequence-parallel --lr-warmup-fraction 0.01"
).split()

QWEN3_30B = (
    _LENGTHS + _MODEL + _FUSED + "--group-query-attention --num-query-groups 2 --kv-channels 32 --qk-layernorm "
    "--norm-topk-prob --num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss "
    "--moe-intermediate-size 32 --moe-ffn-hidden-size 32 --moe-grouped-gemm --moe-permutation-async-comm "
    "--moe-permute-fusion --use-fused-moe-token-permute-and-unpermute --moe-token-dispatcher-type alltoall_seq "
    "--moe-aux-loss-coeff 0.001 --moe-layer-freq -1 --first-k-dense-replace -1 --moe-alltoall-overlap-comm "
    "--moe-tp-extend-ep --expert-tensor-parallel-size 1 --fix-router --gemm-gradient-accumulation-fusion "
    "--no-gradient-accumulation-fusion --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--swap-optimizer --recompute-method uniform --recompute-granularity full --recompute-num-layers 1 "
    "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --expert-model-parallel-size 1 "
    "--context-parallel-size 1 --context-parallel-algo ulysses_cp_algo --use-cp-send-recv-overlap "
    "--use-fused-ring-attention-update --sequence-parallel --manual-gc --manual-gc-interval 50 --seed 42 "
    "--spec mindspeed_llm.tasks.models.spec.qwen3_spec layer_spec --transformer-impl transformer_engine "
    "--ckpt-format torch --handler-name GeneralPretrainHandler --model-type-hf qwen3-moe --no-shared-storage "
    "--log-throughput --lr-warmup-fraction 0.01 --padded-vocab-size 256"
).split()

DEEPSEEK_V3 = (
    _LENGTHS + _MODEL + _FUSED + "--multi-latent-attention --qk-pos-emb-head-dim 16 --qk-head-dim 32 --q-lora-rank 48 "
    "--kv-lora-rank 32 --v-head-dim 32 --qk-layernorm --mla-fa-without-pad --mla-mm-split --mla-swap-core-attn-out "
    "--mla-up-proj-tp-overlap --recompute-mla-up-proj --moe-router-dtype fp32 --moe-grouped-gemm "
    "--moe-permutation-async-comm --moe-token-dispatcher-type alltoall --moe-permute-fusion --first-k-dense-replace 1 "
    "--use-fused-moe-token-permute-and-unpermute --moe-layer-freq 1 --n-shared-experts 1 --num-experts 8 "
    "--moe-router-topk 4 --moe-ffn-hidden-size 64 --moe-shared-expert-intermediate-size 64 "
    "--moe-router-load-balancing-type none --moe-router-num-groups 4 --moe-router-group-topk 2 "
    "--moe-router-topk-scaling-factor 2.5 --moe-aux-loss-coeff 0.0001 --seq-aux --norm-topk-prob "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --expert-tensor-parallel-size 1 --fix-router "
    "--mtp-num-layers 1 --mtp-loss-scaling-factor 0.3 --mtp-mem-efficient-logits --beta-fast 32 --beta-slow 1 "
    "--rope-scaling-factor 40 --rope-scaling-mscale 1.0 --rope-scaling-mscale-all-dim 1.0 "
    "--rope-scaling-original-max-position-embeddings 4096 --rope-scaling-type yarn --moe-fb-overlap "
    "--schedules-method dualpipev --moe-unperm2-mem-optim --moe-zerc --moe-zero-memory level0 --swap-optimizer "
    "--swap-optimizer-times 4 --use-distributed-optimizer --recompute-method uniform --recompute-granularity full "
    "--recompute-num-layers 1 --recompute-activation-function --noop-layers 3 --gemm-gradient-accumulation-fusion "
    "--spec mindspeed_llm.tasks.models.spec.deepseek_spec layer_spec --reset-attention-mask --manual-gc "
    "--manual-gc-interval 50 --no-shared-storage --enable-share-memory --tensor-model-parallel-size 1 "
    "--pipeline-model-parallel-size 1 --expert-model-parallel-size 1 --sequence-parallel --context-parallel-size 1 "
    "--context-parallel-algo ulysses_cp_algo --transformer-impl transformer_engine --ckpt-format torch "
    "--handler-name GeneralPretrainHandler --model-type-hf deepseek3 --use-ascend-coc --coc-fused-kernel "
    "--distributed-timeout-minutes 120 --no-save-optim --no-save-rng --lr-warmup-iters 1 --padded-vocab-size 256"
).split()

SCRIPTS = {"llama3-8b": LLAMA3_8B, "qwen3-30b": QWEN3_30B, "deepseek3": DEEPSEEK_V3}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_shipped_script_starts(trainer: Callable[[str], Trainer], name: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    argv = [SCRIPT, *SCRIPTS[name], *MOCK, "--mindspeed-lite-report", str(report)]
    result = trainer("0.19.2").run(entry="script", arm="adaptor", nproc=1, argv=argv).check()
    losses = result.losses()
    assert len(losses) == 3 and all(0 < loss < 7 for loss in losses)
    notices = json.loads(report.read_text())["notices"]
    for row in flags().values():
        # What neither Megatron nor a feature of ours has under this name is in the report, once.
        if row.flag in SCRIPTS[name] and row.outcome not in ("keep", "rule"):
            if row.outcome == "choose":
                value = SCRIPTS[name][[*SCRIPTS[name]].index(row.flag) + 1]
                if f"{value}>" not in row.words:
                    continue  # Megatron takes this value as it is
            found = [text for text in notices if text.partition(" ")[0] == row.flag]
            assert len(found) == 1 or row.flag == "--moe-permute-fusion", (row.flag, notices)
