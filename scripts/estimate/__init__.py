"""Estimates of the memory and time of a training, made without running it."""
