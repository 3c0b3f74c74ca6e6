"""Ranges in real Megatron: where they are, that nothing stays behind, and what a profiled step makes of them."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from mindspeed_lite import platform
from mindspeed_lite.bench import breakdown
from mindspeed_lite.bench.probes import profiler_ranges
from mindspeed_lite.engine.swaps import function_in
from tests.harness import checkouts
from tests.harness.processes import forked


def held():
    """What Megatron's modules and classes have, and what torch would be left with: objects and functions' code."""
    found = {("torch", "wait"): vars(torch.distributed.Work)["wait"]}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "megatron":
            continue
        for key, value in list(vars(module).items()):
            found[name, key] = value
            if isinstance(value, type) and value.__module__.startswith("megatron"):
                found.update({(value, key): each for key, each in list(vars(value).items())})
    found["torch", "call"] = vars(torch.nn.Module)["__call__"]
    return {place: (value, getattr(function_in(value), "__code__", None)) for place, value in found.items()}


def same(a, b):
    return a is b or (None not in (a, b) and all(x is y for x, y in zip(a, b, strict=True)))


def changed(before, after):
    return {key for key in {*before, *after} if not same(before.get(key), after.get(key))}


@forked("megatron")
def test_nothing_is_different_after_it():
    before = held()
    remove = profiler_ranges.install()
    names = {(str(getattr(owner, "__qualname__", owner)), name) for owner, name in changed(before, held())}
    assert {
        ("torch", "wait"),
        ("torch", "call"),
        ("MixedPrecisionOptimizer", "step"),
        ("DistributedDataParallel", "finish_grad_sync"),
        ("LanguageModule", "compute_language_model_loss"),
        # by value
        ("megatron.core.models.common.embeddings.rope_utils", "apply_rotary_pos_emb"),
        ("megatron.core.transformer.attention", "apply_rotary_pos_emb"),
        ("megatron.core.distributed", "finalize_model_grads"),
    } <= names
    remove()
    assert not changed(before, held())
    profiler_ranges.install()()
    assert not changed(before, held())

    def fails(stack, owner, name, category):
        raise RuntimeError("mine")

    profiler_ranges._replace = fails
    with pytest.raises(RuntimeError, match="mine"):
        profiler_ranges.install()
    assert not changed(before, held())


def test_a_class_says_by_its_name_what_it_is():
    expected = {
        "FusedRMSNorm": "norm", "TELayerNormColumnParallelLinear": "linear", "TEDotProductAttention": "attention",
        "SelfAttention": None, "RotaryEmbedding": "rotary", "VocabParallelEmbedding": "embedding", "TopKRouter": "moe",
        "SharedExpertMLP": "activation", "TransformerLayer": None,
    }  # fmt: skip
    assert {name: profiler_ranges.category_of(name) for name in expected} == expected


@forked("megatron")
def test_a_step_of_a_small_gpt_has_its_time_in_the_right_places(tmp_path):
    from tests.harness import core_loop

    torch.set_num_threads(1)
    platform.activate()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    core_loop.train({"steps": 1, "experts": 4})
    torch.distributed.barrier()
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()

    seen = []
    own = breakdown.attribute

    def attribute(events):
        seen.extend(events)
        return own(events)

    breakdown.attribute = attribute
    remove = profiler_ranges.install()
    try:
        found = breakdown.profile(lambda: core_loop.train({"steps": 1, "experts": 4}), None)[1]
    finally:
        remove()
    categories = found["categories"]
    assert sum(categories.values()) == pytest.approx(found["wall_seconds"])
    assert min(categories.values()) > 0, categories
    # What is certain of a GPT: products are of linear layers or of attention, softmax and rsqrt of one place each,
    # forward and backward.
    step = next(each for each in seen if each.name == breakdown.STEP)
    placed = breakdown._place(each for each in seen if not each.is_async)
    expected = {
        # The router has a product of its own.
        "aten::mm": {"linear", "moe"},
        "aten::bmm": {"attention"},
        "aten::baddbmm": {"attention"},
        "aten::silu": {"activation"},
        "aten::silu_backward": {"activation"},
        "aten::embedding_dense_backward": {"embedding"},
        "aten::rsqrt": {"norm"},
        "aten::topk": {"moe"},
        "aten::_softmax_backward_data": {"attention", "moe"},
        "aten::addcdiv_": {"optimizer"},
    }
    where, products = {}, dict.fromkeys(breakdown.CATEGORIES, 0)
    for each in placed:
        if each.event.thread == step.thread:
            where.setdefault(each.event.name, set()).add(each.decision.category)
            products[each.decision.category] += each.own if each.event.name == "aten::mm" else 0
    for name in ("aten::mm", "aten::silu", "aten::silu_backward", "aten::bmm"):
        assert name in where, name
    for name, places in expected.items():
        assert where.get(name, set()) <= places, f"{name}: {where[name]}"
    assert products["linear"] > 0.5 * sum(products.values()) > products["moe"]


def definitions(path):
    """`function` and `Class.method` of a source file."""
    found = set()
    for node in ast.parse(path.read_text(), str(path)).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return found


def test_each_function_is_in_some_supported_release_and_each_category_in_all():
    missing = {target for _, target in profiler_ranges.FUNCTIONS}
    for release in checkouts.ALL:
        folder = checkouts.folder(release)
        if folder is None:
            folder = Path(importlib.util.find_spec("megatron").submodule_search_locations[0]).parent
        if not folder.is_dir():
            pytest.skip(f"megatron-core {release} is not prepared")
        there = {
            (category, target)
            for category, target in profiler_ranges.FUNCTIONS
            if (path := folder.joinpath("megatron", "core", *target.partition(":")[0].split(".")).with_suffix(".py"))
            and path.is_file()
            and target.partition(":")[2] in definitions(path)
        }
        assert {category for category, _ in there} == {category for category, _ in profiler_ranges.FUNCTIONS}, release
        missing -= {target for _, target in there}
    assert not missing
