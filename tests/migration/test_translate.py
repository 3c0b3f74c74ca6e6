"""What depends on other flags: traps, pairs, layers that are empty; and commands that are not MindSpeed's."""

from __future__ import annotations

import pytest

from mindspeed_lite.migration import flags, translate

MEGATRON = frozenset(
    "--rotary-scaling-factor --multi-latent-attention --use-rope-scaling --moe-ffn-hidden-size "
    "--pipeline-model-parallel-layout --recompute-granularity --recompute-modules "
    "--pipeline-model-parallel-size --num-layers-per-virtual-pipeline-stage --mtp-num-layers "
    "--gradient-accumulation-fusion --cp-comm-type --window-size "
    "--moe-shared-expert-intermediate-size --use-ascend-coc --use-ascend-mc2 --use-fused-adamw --num-experts "
    "--context-parallel-algo --cp-window-size --moe-alltoall-overlap-comm --moe-hierarchical-alltoallv "
    "--moe-zero-memory --use-fused-linear-cross-entropy --context-parallel-size --tokenizer-model --load "
    "--qk-head-dim --qk-layernorm --rope-type --experimental-attention-variant --dsa-indexer-topk "
    "--dsa-indexer-n-heads --dsa-indexer-head-dim --dsa-indexer-loss-coeff --linear-attention-freq "
    "--attention-output-gate".split()
) | {row.flag.partition("=")[0] for row in flags().values() if "shared" in row.idle}  # fmt: skip


def become(text, **more):
    return " ".join(translate(text.split(), MEGATRON, **more).accepted)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # Names that both have and that mean other things.
        ("--multi-latent-attention --rope-scaling-type yarn --rope-scaling-factor 40",
         "--multi-latent-attention --rotary-scaling-factor 40"),
        ("--use-rope-scaling --rope-scaling-factor 40", "--use-rope-scaling --rope-scaling-factor 40"),
        ("--multi-latent-attention --rope-scaling-factor 40", "--multi-latent-attention --rope-scaling-factor 40"),
        ("--rope-scaling-type llama3 --rope-scaling-factor 8", "--use-rope-scaling --rope-scaling-factor 8"),
        ("--no-gradient-accumulation-fusion --gemm-gradient-accumulation-fusion", "--gradient-accumulation-fusion"),
        ("--no-gradient-accumulation-fusion", "--no-gradient-accumulation-fusion"),
        ("--transformer-impl transformer_engine", "--transformer-impl transformer_engine"),
        ("--transformer-impl transformer_engine --norm-topk-prob", "--transformer-impl local"),
        ("--spec mindspeed_llm.x layer_spec --load x", "--load x"),
        ("--spec local_module layer_spec", "--spec local_module layer_spec"),
        ("--spec mindspeed_llm.tasks.models.spec.plm_spec layer_spec", "--qk-layernorm"),
        ("--spec mindspeed_llm.tasks.models.spec.plm_spec layer_spec --qk-layernorm", "--qk-layernorm"),
        ("--multi-latent-attention --rope-scaling-type plm", "--multi-latent-attention --rope-type rope"),
        ("--enable-dsa-indexer --index-topk 8 --transformer-impl local",
         "--experimental-attention-variant dsa --dsa-indexer-n-heads 64 --dsa-indexer-head-dim 128 "
         "--dsa-indexer-loss-coeff 1.0 --dsa-indexer-topk 8"),
        ("--full-attention-interval 4 --transformer-impl local --mamba-d-conv 4 --mamba-expand 1",
         "--experimental-attention-variant gated_delta_net --linear-attention-freq 4 --attention-output-gate"),
        ("--norm-topk-prob --moe-router-pre-softmax", ""),
        ("--moe-router-pre-softmax", "--moe-router-pre-softmax"),
        ("--enable-hf2mg-convert --load x --enable-mg2hf-convert --hf-cfg-dir y", "--load x"),
        # Context parallel.
        ("--context-parallel-size 2 --context-parallel-algo=ulysses_cp_algo --cp-window-size 1",
         "--context-parallel-size 2 --context-parallel-algo=ulysses_cp_algo --cp-window-size 1"),
        # Layers.
        ("--num-layers 8 --noop-layers 7 --pipeline-model-parallel-size 2",
         "--num-layers 7 --pipeline-model-parallel-layout Et*4|t*3L --pipeline-model-parallel-size 2"),
        ("--num-layers 8 --noop-layers 6,7 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 "
         "--mtp-num-layers 1",
         "--num-layers 6 --pipeline-model-parallel-layout Et*2|t*2|t*2|mL --pipeline-model-parallel-size 2 "
         "--mtp-num-layers 1"),
        ("--num-layers 8 --noop-layers 0,7", "--num-layers 6"),
        ("--num-layers-per-virtual-pipeline-stag 2", "--num-layers-per-virtual-pipeline-stage 2"),
        ("--num-layers 28 --num-layer-list 6,8,8,6 --pipeline-model-parallel-size 4",
         "--num-layers 28 --pipeline-model-parallel-layout Et*6|t*8|t*8|t*6L --pipeline-model-parallel-size 4"),
        ("--num-layers 11 --pipeline-num-transformer-layers [[2,3],[4,2]] --pipeline-model-parallel-size 2",
         "--num-layers 11 --pipeline-model-parallel-layout Et*2|t*4|t*3|t*2L --pipeline-model-parallel-size 2"),
        ("--num-layers 6 --pipeline-num-transformer-layers [[1],[2]*2,[1]] --pipeline-model-parallel-size 4",
         "--num-layers 6 --pipeline-model-parallel-layout Et*1|t*2|t*2|t*1L --pipeline-model-parallel-size 4"),
        ("--num-layers 4 --pipeline-num-transformer-layers [[0,1],[1*2],[1,0]] --pipeline-model-parallel-size 3",
         "--num-layers 4 --pipeline-model-parallel-layout E|t*1|t*1|t*1|t*1|L --pipeline-model-parallel-size 3"),
        ("--num-layers 5 --pipeline-num-transformer-layers [2,3] --pipeline-model-parallel-size 2 "
         "--num-layers-per-virtual-pipeline-stage 1",
         "--num-layers 5 --pipeline-model-parallel-layout Et*2|t*3L --pipeline-model-parallel-size 2"),
        ("--num-layers 64 --noop-layers 61,62,63 --num-experts 8 --first-k-dense-replace 3 --moe-layer-freq 1",
         "--num-layers 61 --num-experts 8 --moe-layer-freq ([0]*3+[1]*58)"),
        ("--num-layers 6 --num-experts 8 --first-k-dense-replace 1 --moe-layer-freq 2",
         "--num-layers 6 --num-experts 8 --moe-layer-freq [0,0,1,0,1,0]"),
        ("--num-experts 8 --moe-layer-freq -1 --first-k-dense-replace -1", "--num-experts 8"),
        ("--num-layers 4 --num-experts 8 --moe-layer-freq -1 --first-k-dense-replace 1",
         "--num-layers 4 --num-experts 8 --moe-layer-freq ([0]*1+[1]*3)"),
        ("--moe-layer-freq 2", "--moe-layer-freq 2"),
        # Experts.
        ("--moe-permutation-async-comm --moe-token-dispatcher-type alltoall_seq",
         "--moe-alltoall-overlap-comm --moe-token-dispatcher-type alltoall"),
        ("--moe-permutation-async-comm --moe-token-dispatcher-type allgather", "--moe-token-dispatcher-type allgather"),
        ("--moe-zerc --moe-permutation-async-comm", "--moe-hierarchical-alltoallv"),
        ("--moe-zerc --moe-alltoall-overlap-comm", "--moe-alltoall-overlap-comm"),
        ("--moe-zerc --moe-zero-memory level0", "--moe-zero-memory level0"),
        ("--n-shared-experts 2 --moe-intermediate-size 64",
         "--moe-shared-expert-intermediate-size 128 --moe-ffn-hidden-size 64"),
        ("--moe-ffn-hidden-size 64 --moe-intermediate-size 64", "--moe-ffn-hidden-size 64"),
        ("--seq-aux", "--moe-router-load-balancing-type seq_aux_loss"),
        ("--moe-router-load-balancing-type none --seq-aux", "--moe-router-load-balancing-type seq_aux_loss"),
        ("--moe-router-load-balancing-type noaux_tc", "--moe-router-load-balancing-type none"),
        # Memory.
        ("--recompute-mla-up-proj", "--recompute-granularity selective --recompute-modules mla_up_proj"),
        ("--recompute-mla-up-proj --recompute-granularity full", "--recompute-granularity full"),
        ("--mla-zero-memory --recompute-modules mla_up_proj", "--recompute-modules mla_up_proj"),
        ("--comm-overlap-type default", ""),
        # Values that belong to a flag go with it, and those of another stay.
        ("--qk-nope-head-dim=128 x", "--qk-head-dim 128 x"),
        ("--noop-layers 1 -- --noop-layers 1", "-- --noop-layers 1"),
    ],
)  # fmt: skip
def test_it_becomes(given, expected):
    assert become(given) == expected


STAGES = "--pipeline-num-transformer-layers"
TWO = "--pipeline-model-parallel-size 2"
REFUSED = [
    ("--rope-scaling-type yarn", "--rope-scaling-type yarn (Megatron has it): YaRN without latent attention"),
    ("--profile-ranks -1", "--profile-ranks -1 (Megatron has it): Megatron has no -1 for all ranks. Instead: list"),
    (
        "--post-norm --interleave-sliding-window 8",
        "Megatron does not build Gemma 2 (soft-capping, norms after each block, windows in every second layer): "
        "--post-norm --interleave-sliding-window",
    ),
    ("--rope-scaling-type longrope --long-factor 1 2", "Megatron does not build Phi-3.5 (LongRoPE; SparseMixer and "),
    ("--rope-scaling-type x", "--rope-scaling-type (Megatron has it): takes llama3, yarn, plm or"),
    ("--moe-ffn-hidden-size 32 --moe-intermediate-size 64", "--moe-intermediate-size and --moe-ffn-hidden-size are"),
    ("--n-shared-experts 1", "--n-shared-experts needs --moe-ffn-hidden-size."),
    ("--n-shared-experts x", "--n-shared-experts takes a whole number, not 'x'"),
    ("--noop-layers 9 --num-layers 4", "--noop-layers 9: --num-layers 4 has layers 0 to 3"),
    ("--noop-layers x --num-layers 4", "--noop-layers takes layers, separated by commas"),
    ("--num-layers 8 --noop-layers 7 --num-virtual-stages-per-pipeline-rank 2", "--noop-layers with"),
    *(
        (f"{STAGES} {table} {TWO}", f"{STAGES} takes a table [[1,2],[2,1]], a row for each rank, not '{table}'")
        for table in "[[1,2],[3]] 1;2 [[1.5,2.5]] [[Infinity]] [true,1] [1]*9999 [1]*0 {} 3 [[[1]],[1]]".split()
    ),
    (f"{STAGES} [1,2,3] {TWO}", f"{STAGES} has 3 rows for 2 pipeline ranks"),
    (f"--num-layers 4 {STAGES} [1,2] {TWO}", f"{STAGES} has 3 layers, and --num-layers 4"),
    (f"--num-layers 3 --noop-layers 1 {STAGES} [1,2] {TWO}", f"{STAGES} with --noop-layers"),
    ("--num-layer-list 1,2 --pipeline-model-parallel-size 3", "--num-layer-list has 2 rows for 3 pipeline ranks"),
    (f"--num-layer-list 1;2 {TWO}", "--num-layer-list takes layer counts such as 6,8,8,6, not '1;2'"),
    ("--context-parallel-size 2 --adaptive-cp-without-coarse", "--adaptive-cp-without-coarse"),
    ("--norm-topk-prob --moe-router-pre-softmax --n-group 2", "--moe-router-pre-softmax with --norm-topk-prob and"),
    ("--recompute-mla-up-proj --recompute-modules moe", "--recompute-mla-up-proj with --recompute-modules"),
    ("--optimizer-selection fused_ema_adamw", "--optimizer-selection (outside mindspeed_lite): takes fused_adamw or"),
    ("--tokenizer-name-or-path", "--tokenizer-name-or-path needs a value"),
    ("--sliding-window", "--sliding-window needs a value"),
    ("--npu-deterministic", "--npu-deterministic is --deterministic-mode, and this release of Megatron-core has no"),
    ("--auto-settings", "--auto-settings (done another way): "),
    ("--ttp-enabled", "--ttp-enabled (outside mindspeed_lite): "),
    ("--use-nd-matmul", "--use-nd-matmul (no longer in MindSpeed): "),
    (
        "--moe-router-load-balancing-type group_limited_greedy",
        "--moe-router-load-balancing-type group_limited_greedy: a type",
    ),
]


@pytest.mark.parametrize(("given", "line"), REFUSED)
def test_it_is_one_line(given, line):
    found = translate(given.split(), MEGATRON)
    assert any(each.startswith(line) and "\n" not in each for each in found.refusals), found.steps


def test_a_command_without_mindspeed_flags_stays_as_it_is():
    words = "--num-layers 4 --spec x y --rope-scaling-factor 8 --transformer-impl transformer_engine"
    found = translate(words.split(), MEGATRON)
    assert found.accepted == tuple(words.split()) and not found.notices and not found.refusals


def test_flags_of_the_script_win_over_the_table():
    words = "--first-k-dense-replace 3 --moe-layer-freq 2 --auto-settings".split()
    found = translate(words, MEGATRON | {"--first-k-dense-replace", "--auto-settings"})
    assert found.accepted == tuple(words) and not found.notices and not found.refusals


def test_one_notice_for_a_flag_that_is_given_twice():
    assert len(translate(["--norm-topk-prob", "--norm-topk-prob"], MEGATRON).notices) == 1
