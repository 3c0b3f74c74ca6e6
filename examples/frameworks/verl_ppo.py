"""Steps of PPO by verl's Megatron engine on a tiny Llama, without Ray and without generation; on a CPU, too.

    VERL_USE_EXTERNAL_MODULES=mindspeed_lite_plugin,verl_post_training PYTHONPATH=. \\
        torchrun --nproc-per-node 1 verl_ppo.py

Needs verl 0.9.1, mbridge 0.15.1 and megatron-core 0.16.1. Exports weights, moves them away, computes log-probabilities,
trains; after two steps it saves and loads a checkpoint. The last line is JSON: a step's losses, and bytes of weights.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

VOCABULARY, RESPONSE, LENGTHS = 512, 6, (13, 9, 16, 11)


def save_llama(folder: Path) -> None:
    """A Llama of random weights, as Hugging Face keeps one."""
    import transformers
    from tokenizers import Tokenizer, models

    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{each}": each for each in range(VOCABULARY)}, unk_token="w0"))
    special = {"pad_token": "w1", "eos_token": "w2", "bos_token": "w3"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)


def engine_of(folder: str, tensor_parallel: int, fused: bool) -> Any:
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
    from verl.workers.engine import EngineRegistry

    model = HFModelConfig(
        path=folder, use_remove_padding=True, use_fused_kernels=fused, override_config={"attn_implementation": "eager"}
    )
    parallel = McoreEngineConfig(
        tensor_model_parallel_size=tensor_parallel,
        sequence_parallel=tensor_parallel > 1,
        param_offload=True,
        optimizer_offload=True,
        use_mbridge=True,
        vanilla_mbridge=True,
        use_remove_padding=True,
        use_fused_kernels=fused,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=2,
        override_transformer_config={"gradient_accumulation_fusion": False, "masked_softmax_fusion": False},
    )
    optimizer = McoreOptimizerConfig(lr=1e-3, lr_warmup_steps=0, total_training_steps=10)
    return EngineRegistry.new(
        model_type="language_model",
        backend="megatron",
        model_config=model,
        engine_config=parallel,
        optimizer_config=optimizer,
        checkpoint_config=CheckpointConfig(),
    )


def prompts_and_responses() -> Any:
    """As verl's trainer gives them to the engine: nested rows without padding."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.utils.dataset.dataset_utils import DatasetPadMode

    generator = torch.Generator().manual_seed(2)
    tokens = [torch.randint(4, VOCABULARY, (length,), generator=generator) for length in LENGTHS]
    gains = torch.randn(len(LENGTHS), generator=generator)
    rows = {
        "input_ids": tokens,
        "position_ids": [torch.arange(length) for length in LENGTHS],
        "loss_mask": [(torch.arange(length) >= length - RESPONSE).long() for length in LENGTHS],
        "advantages": [gain.expand(length) for gain, length in zip(gains, LENGTHS, strict=True)],
    }
    nested = {name: torch.nested.as_nested_tensor(each, layout=torch.jagged) for name, each in rows.items()}
    temperature = torch.full((len(LENGTHS),), 0.8)
    data = TensorDict({**nested, "temperature": temperature}, batch_size=[len(LENGTHS)])
    fixed = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2, "global_batch_size": len(LENGTHS)}
    tu.assign_non_tensor(data, calculate_entropy=True, pad_mode=DatasetPadMode.NO_PADDING, **fixed)
    return data


def ppo_loss(model_output: Any, data: Any, dp_group: Any = None) -> Any:
    log_prob, entropy = model_output["log_probs"].values(), model_output["entropy"].values()
    before, gain, mask = (data[name].values() for name in ("old_log_probs", "advantages", "loss_mask"))
    ratio = (log_prob - before).exp()
    clipped = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
    loss = -((clipped + 0.01 * entropy) * mask).sum() / mask.sum()
    return loss, {"entropy": ((entropy * mask).sum() / mask.sum()).item()}


def weight_bytes(engine: Any) -> int:
    storages = {each.untyped_storage()._cdata: each.untyped_storage() for each in engine.module[0].parameters()}
    return sum(each.nbytes() for each in storages.values())


def step(engine: Any) -> dict[str, Any]:
    exported, _ = engine.get_per_tensor_param()
    found: dict[str, Any] = {"exported": sum(weight.numel() for _, weight in exported), "awake": weight_bytes(engine)}
    engine.to("cpu", model=True, optimizer=False, grad=False)
    found["asleep"] = weight_bytes(engine)  # while a rollout engine generates
    data = prompts_and_responses()
    with engine.eval_mode():
        data["old_log_probs"] = engine.infer_batch(data)["model_output"]["log_probs"]
    with engine.train_mode():
        output = engine.train_batch(data, ppo_loss)
    metrics = output.get("metrics", {})
    return {**found, "loss": output.get("loss"), **{name: metrics.get(name) for name in ("entropy", "grad_norm")}}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--logits", action="store_true", help="log-probabilities from logits")
    options = parser.parse_args()
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    dist.init_process_group("gloo" if os.environ.get("MINDSPEED_LITE_DEVICE") == "cpu" else None)
    with tempfile.TemporaryDirectory() as own:
        every = [""] * dist.get_world_size()
        dist.all_gather_object(every, own)
        folder = every[0]
        if dist.get_rank() == 0:
            save_llama(Path(folder))
        dist.barrier()
        engine = engine_of(folder, options.tensor_parallel, fused=not options.logits)
        model_parallel_cuda_manual_seed(1)  # verl does on a device alone
        engine.initialize()
        steps = [step(engine) for _ in range(2)]
        engine.save_checkpoint(folder)
        engine.load_checkpoint(folder, del_local_after_load=False)
        steps.append(step(engine))
        dist.barrier()
    if dist.get_rank() == 0:
        print(json.dumps(steps), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
