"""Every call of torch_npu that the package makes, on the real wheel, without an NPU: `make test-npu`.

environment.py  installs the wheel into a folder of its own, builds stub CANN libraries (stubs.py, cann/), and
                starts subprocesses in one of two modes
operators/      one file per operator: its calls by table, and what is documented of them
definitions.py  what those files are written with
runner.py       what such a subprocess does: makes the calls, and writes what was recorded (recorder.py) as JSON
model_run.py    a whole Megatron model, against the lists in golden/

What this proves is the call: names, types, shapes, the operator's own backward. What the conversions mean is proven on
the emulation (`tests/ops/test_npu.py`). That the kernels compute the right values on a device is not proven.
"""
