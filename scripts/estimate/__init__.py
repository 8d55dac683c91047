"""Estimates of the memory and time of a training run, made without running it."""
