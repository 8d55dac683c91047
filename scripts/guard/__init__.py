"""The guards of a training run: checks before it, checkpoints and stops in it, the knob audit, silent faults.

The watchdog is in scripts/distributed, because it guards the start of the process group, in other programs, too.
"""
