"""Pipeline-parallel schedules: build, check, simulate, execute.

steps           schedules as data
orders          1F1B, interleaved, ZB-H1, DualPipeV
zero_bubble     separate weight gradients for given costs and memory
recompute_plan  recomputation as steps
check           validation; user schedules
costs           seconds and bytes
simulate        timing and idle time
trace           recorded executions
draw            text and PNG
program, run    communication calls, and their execution
wgrad           deferred weight gradients
"""
