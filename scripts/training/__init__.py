"""The parts of a training: Trainer, callbacks, checkpoints, knob audit and measurements."""
