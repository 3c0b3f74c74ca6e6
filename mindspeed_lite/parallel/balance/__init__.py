"""Load balance over ranks: experts by tokens, micro-batches by attention cost.

record       expert load file
counts       expert token counts and averages
placement    expert-to-rank assignment: pure functions
placer       moves experts between ranks while training
copies       per-micro-batch copies of hot experts, and their measured cost
lengths      order of micro-batches, and its predicted gain
simulation   predicted gain of copies and placement
"""
