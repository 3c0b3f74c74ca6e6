"""Pipeline-parallel schedules: build, check, simulate, execute.

steps           schedules as data
orders          published schedules: 1F1B, interleaved, ZB-H1, DualPipeV
zero_bubble     schedules with separate weight gradients for given costs and memory
recompute_plan  recomputation as separate steps
check           validates a schedule; loads a user's
costs           seconds and bytes of steps
simulate        timing and idle time
trace           recorded executions
draw            text and PNG
program         communication calls of a rank
run             executes a program
wgrad           deferred weight gradients
"""
