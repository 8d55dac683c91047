"""A training run as rank 0 of many ranks, without a network or values of tensors. benchmarks/rehearse.py runs it."""
