"""Estimates of the memory of a training run, and of the bytes that its ranks send, made without running it."""
