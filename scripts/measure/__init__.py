"""Measurements of a training run: speed, operations, memory, energy, activity of the GPU, Exact Match and F1."""
