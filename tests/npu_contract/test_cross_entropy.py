"""Why cross_entropy has no NPU backend: what npu_cross_entropy_loss returns and keeps, on the wheel itself.

Documented besides: a target lies within the vocabulary, and label smoothing has no gradient without a reduction.
"""

from __future__ import annotations

import json

from tests.npu_contract.environment import Environment

LOSS = """
import json
import torch, torch_npu
from torch._subclasses.fake_tensor import FakeTensorMode

found = {}
with FakeTensorMode():
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        logits = torch.zeros(6, 40, dtype=dtype, device="npu", requires_grad=True)
        target = torch.zeros(6, dtype=torch.int64, device="npu")
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append((t, list(t.shape))) or t, lambda t: t):
            loss, log_prob, *_ = torch_npu.npu_cross_entropy_loss(logits, target, reduction="none")
        whole = any(t is not logits and t.dtype == dtype and shape == [6, 40] for t, shape in kept)
        results = [[str(t.dtype), list(t.shape)] for t in (loss, log_prob)]
        found[str(dtype)] = [*results, whole]
print(json.dumps(found), flush=True)
"""


def test_the_loss_is_in_the_logits_dtype_and_a_tensor_of_their_size_is_kept(environment: Environment) -> None:
    ran = environment.run(LOSS, "fake")
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    dtypes = ["torch.bfloat16", "torch.float16", "torch.float32"]
    assert found == {each: [[each, [6]], [each, [6, 40]], True] for each in dtypes}
