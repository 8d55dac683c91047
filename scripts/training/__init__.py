"""The Trainer of a training run, its callbacks, and workarounds for the libraries."""
