"""What happens inside a training: its Trainer, callbacks, checkpoints, knob audit, record."""
