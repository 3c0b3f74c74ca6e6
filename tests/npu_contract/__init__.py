"""Every call of torch_npu that the package makes, on the real wheel, without an NPU: `make test-npu`.

environment.py  installs the wheel into a folder of its own, builds stub CANN libraries (stubs.py, cann/), and
                starts subprocesses in one of four modes
operators/      one file per operator: its calls by table, what is documented of them, call sites broken on purpose
                (each must be noticed)
definitions.py  what those files are written with
attention_calls.py
                the sizes of a recorded attention call, and what it shows to whom
runner.py       what such a subprocess does: runs the cases, and writes what was recorded (recorder.py) as JSON
checks.py       what a case as a whole must have done
model_run.py    a whole Megatron model, against the lists in golden/

What this proves is the call: names, types, shapes, masks, the operator's own backward. That the kernels compute
the right values on a device is not proven here.
"""
