"""`--balanced-moe-experts`: when it applies, what it falls back for, and that a dispatcher is as before afterwards.

Trainings are in tests/training.
"""

from __future__ import annotations

import pytest

from tests.harness.processes import forked, on_ranks


@forked("megatron")
def test_copies_are_made_where_they_pay_and_leave_no_trace(tmp_path):
    def body(rank):
        import torch
        from megatron.core import parallel_state as ps
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
        from megatron.core.transformer import TransformerConfig

        import mindspeed_lite
        from mindspeed_lite import platform
        from mindspeed_lite.engine import FallbackError
        from mindspeed_lite.parallel.balance.copies import CopyPlan, PendingGradients
        from mindspeed_lite.planner.traces import Part, _spread
        from mindspeed_lite.planner.training import TrainingConfig
        from tests.harness.process_groups import joined

        platform.activate()
        joined(rank, 2, tmp_path)
        ps.initialize_model_parallel(expert_model_parallel_size=2)
        model_parallel_cuda_manual_seed(3)
        config = TransformerConfig(
            num_layers=1, hidden_size=8, num_attention_heads=1, num_moe_experts=4, moe_router_topk=1,
            moe_ffn_hidden_size=16, moe_token_dispatcher_type="alltoall", expert_model_parallel_size=2,
            add_bias_linear=False, moe_router_load_balancing_type="none", moe_router_pre_softmax=True,
        )  # fmt: skip
        layer = get_gpt_layer_local_spec(num_experts=4).submodules.mlp(config=config)
        layer.set_layer_number(1)
        dispatcher, made = layer.token_dispatcher, []
        before = {name: value for name, value in vars(dispatcher).items() if "expert" in name}
        own = CopyPlan.make
        CopyPlan.make = lambda self, given: made.append(self.owners) or own(self, given)
        # All tokens to the first expert, which is on rank 0.
        with torch.no_grad():
            layer.router.weight.zero_()
            layer.router.weight[0] = 1.0
        x = torch.rand(6, 1, 8)

        def passed():
            leaf = x.clone().requires_grad_()
            layer.zero_grad(set_to_none=True)
            y, _ = layer(leaf)
            y.square().sum().backward()
            grads = [torch.zeros(()) if each.grad is None else each.grad.clone() for each in layer.parameters()]
            return [y.detach(), leaf.grad, *grads]

        off = passed()
        # What copies keep until the backward pass of their micro-batch is what the planner predicts.
        like = [*layer.experts.local_experts[0].parameters()]
        for each in like:
            each.main_grad = torch.zeros_like(each)
        for accumulates in (False, True):
            plan = CopyPlan([0], like, dispatcher.ep_group, PendingGradients(), accumulates)
            copies = plan.make([None if rank else like])
            copies.wait()
            kept = [*copies.of(0), *(each.main_grad for each in copies.of(0) if accumulates)]
            storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in kept}
            training = TrainingConfig(
                num_layers=1, hidden_size=8, num_attention_heads=1, seq_length=6, micro_batch_size=1, world_size=2,
                num_experts=4, expert_model_parallel_size=2, moe_ffn_hidden_size=16, add_bias_linear=False,
                moe_token_dispatcher_type="alltoall", balanced_moe_experts=True, balanced_moe_hot_expert_num=1,
                fuses_accumulation=accumulates,
            )  # fmt: skip
            held = _spread(training, Part(0, 2 * sum(each.numel() for each in like), {}, {}, {}))
            assert sum(storages.values()) == held.kept["mlp.copies"][1]
        for each in like:
            del each.main_grad
        for number, break_even, copies in ((3, 0.0, 1), (3, 5.9, 1), (3, 6.0, 0), (3, None, None)):
            made.clear()
            settings = {"balanced_moe_hot_expert_num": number, "balanced_moe_break_even": break_even}
            with mindspeed_lite.enabled(balanced_moe_experts=True, strict=True, **settings):
                for _ in range(2):
                    torch.testing.assert_close(passed(), off)
                notices = " ".join(mindspeed_lite.report().notices)
            if break_even is None:
                assert "copies are made that take" in notices
            else:
                assert made == [[0]] * 2 * copies and "a copy takes" not in notices
        for name, value in before.items():
            assert vars(dispatcher)[name] is value, name
        grouped = {"moe_grouped_gemm": True, "balanced_moe_experts": True, "balanced_moe_break_even": 0.0}
        with mindspeed_lite.enabled(**grouped, strict=True):
            # As the first pass of a layer that is computed again.
            with torch.no_grad():
                torch.testing.assert_close(layer(x)[0], off[0])
            torch.testing.assert_close(passed(), off)
        made.clear()
        for a, b in zip(passed(), off, strict=True):
            assert torch.equal(a, b)
        assert not made

        with (
            mindspeed_lite.enabled(balanced_moe_experts=True, strict=True),
            pytest.raises(FallbackError, match="gives all experts as many tokens"),
        ):
            layer.experts.config.moe_pad_expert_input_to_capacity = True
            passed()
        layer.experts.config.moe_pad_expert_input_to_capacity = False

        # As Megatron's inference does with a live model: behind a pass with copies, one without.
        with mindspeed_lite.enabled(balanced_moe_experts=True, balanced_moe_break_even=0.0):
            passed()
            layer.experts.config.moe_pad_expert_input_to_capacity = True
            for a, b in zip(passed(), off, strict=True):
                assert torch.equal(a, b)
            layer.experts.config.moe_pad_expert_input_to_capacity = False
        made.clear()

        # Of one rank: the other makes no copies either.
        why = "another rank" if rank else "a frozen parameter"
        layer.experts.local_experts[0].linear_fc1.weight.requires_grad_(rank == 1)
        with mindspeed_lite.enabled(balanced_moe_experts=True, balanced_moe_break_even=0.0):
            passed()
            passed()
            (found,) = mindspeed_lite.report().fallbacks
            assert why in found.reason and not made
        with (
            mindspeed_lite.enabled(balanced_moe_experts=True, strict=True),
            pytest.raises(FallbackError, match=why),
        ):
            passed()

    on_ranks(2, body)
