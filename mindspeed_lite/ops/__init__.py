"""Fused operators: a public function, a reference and one backend per device; tensors in, tensors out.

One folder per operator (`discovery.py`): `__init__.py` has the public function, `reference.py` the definition in
PyTorch, `cases.py` test and benchmark shapes, `cpu.py`, `cuda.py` and `npu.py` the backends, chosen by the tensors'
device (`dispatch.py`). No process groups, configuration objects or Megatron here.
"""
