"""A GPT that is built from words and forgotten; its layers are those of `tests/planner/traces.json`."""

from __future__ import annotations

import math

import pytest

from tests.harness.processes import forked

WORDS = (
    "--hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 "
    "--global-batch-size 2 --train-iters 1 --eval-iters 0 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 255 --transformer-impl local --attention-dropout 0 --hidden-dropout 0"
).split()


@forked("megatron", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
def test_it_is_built_run_and_forgotten() -> None:
    import torch

    import mindspeed_lite.megatron_adaptor  # noqa: F401
    from mindspeed_lite.patches._shared import gpt_model

    tokens = torch.randint(255, (2, 64))
    batch = {
        "tokens": tokens, "labels": torch.randint(255, (2, 64)), "position_ids": torch.arange(64).expand(2, 64),
        "loss_mask": torch.ones(2, 64), "attention_mask": torch.ones(2, 1, 64, 64).triu(1).bool(),
    }  # fmt: skip
    for layers in (1, 2):
        model, args = gpt_model.build(["--num-layers", str(layers), *WORDS])
        output, loss_of = gpt_model.forward_step(iter([batch]), model)
        # Untrained, every token is about as likely as the others.
        assert loss_of(output).item() == pytest.approx(2 * 64 * math.log(args.padded_vocab_size), rel=0.05)
        assert len(model.module.decoder.layers if hasattr(model, "module") else model.decoder.layers) == layers
        gpt_model.forget()
