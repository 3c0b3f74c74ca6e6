"""The order of work in a pipeline-parallel training step.

steps           schedules as data, with their messages and dependencies
orders          published schedules: 1F1B, interleaved, ZB-H1, DualPipeV
zero_bubble     schedules with separate weight gradients for given costs and memory
recompute_plan  recomputation as separate steps
check           validates a schedule; loads a user's
costs           seconds and bytes of steps
simulate        when each step runs, and where ranks wait
trace           what an executor has recorded
draw            schedules as text and as pictures
program         the calls that carry a rank's messages
run             executes a program
wgrad           deferred weight gradients
"""
