"""Operators for whoever replaces a hot spot: tensors in, tensors out.

One folder per operator. Inside, always the same names: `__init__.py` holds the public function and its
contract, `reference.py` the definition in plain PyTorch that every test compares with, and `cpu.py`,
`cuda.py`, `npu.py` what a device can do better. The device of the tensors chooses (`dispatch.py`).
Nothing here knows a process group, a configuration object or Megatron.
"""
