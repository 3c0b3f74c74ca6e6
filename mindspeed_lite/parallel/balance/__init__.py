"""Balances load over ranks: experts by tokens, micro-batches by attention cost.

record                 the file of expert load
counts                 tokens of experts, counted and averaged while training
placement              which rank computes an expert: pure functions, standard library
placer                 moves experts between ranks while training
copies                 copies of hot experts on every rank, for one micro-batch
payoff                 what copies and moves cost, measured
lengths                the order of micro-batches
simulation, length_simulation   what either would have gained
"""
