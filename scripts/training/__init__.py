"""What runs beside the training's loop: the knob audit, callbacks, checkpoints, the run record."""
