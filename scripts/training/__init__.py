"""The parts of a training run: Trainer, callbacks, checkpoints, knob audit and measurements."""
