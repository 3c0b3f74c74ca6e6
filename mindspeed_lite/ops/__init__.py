"""Fused operators: a public function, a reference and one backend per device; tensors in, tensors out.

One folder per operator, found by its files (`discovery.py`). Inside, always the same names: `__init__.py` holds the
public function and its contract, `reference.py` the definition in plain PyTorch that every test compares with,
`cases.py` what is timed and judged (with `bench.py` where that takes code), and `cpu.py`, `cuda.py`, `npu.py` what a
device can do better. The device of the tensors chooses (`dispatch.py`). Nothing here knows a process group, a
configuration object or Megatron.
"""
