"""Every call of torch_npu that the package makes, on the real wheel, without an NPU: `make test-npu`.

environment.py  installs the wheel into a folder of its own, builds stub CANN libraries (stubs.py, cann/), and
                starts subprocesses in one of four modes
cases.py        the calls of our operators, by table: the next operator is one more entry
runner.py       what such a subprocess does: runs the cases, and writes what was recorded (recorder.py) as JSON
contracts.py    what is documented of each torch_npu operator, as checks over a recorded call
checks.py       what a case as a whole must have done
mutations.py    call sites broken on purpose: each must be noticed
probes.py       wrong calls made directly, and who notices them: the wheel, or only the contracts

What this proves is the call: names, types, shapes, masks, the operator's own backward. That the kernels compute
the right values on a device is not proven here.
"""
