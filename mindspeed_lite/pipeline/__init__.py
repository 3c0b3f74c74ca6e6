"""Orders the work of a training step.

steps           what a rank computes, as data; messages and dependencies that follow from it
orders          published schedules: 1F1B, interleaved, ZB-H1, DualPipeV
zero_bubble     schedules with separate weight gradients, for given costs and memory
recompute_plan  recomputation as steps of their own, before gradients arrive or in gaps
costs           seconds and bytes of steps; what a rank holds
simulate        when each step runs, and where ranks wait
check           what is wrong with a schedule; orders of a user's own
draw            schedules as text and as pictures
trace           what an executor has recorded
program         the calls that carry a rank's messages
run             executes a program
wgrad           weight gradients that are computed later
"""
