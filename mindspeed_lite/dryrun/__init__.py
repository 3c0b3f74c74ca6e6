"""Runs a training script as any rank of any world on one machine: no storage, no peers, real code.

Tensors have shapes and no values (`fake_tensors`), process groups record messages and send none (`world`). `worker`
runs the script in a process per rank; `launch` finds it in a launch command; `match` compares ranks' messages.
`work` counts operators by module, `repeat` micro-batches that do what the second did, without running them.
"""
