"""Layer 1: fault-tolerant collectives over MPI ULFM. Knows ranks and replicas, not models.

Uses mpi4py and numpy only; torch and Megatron are never imported here.
"""
