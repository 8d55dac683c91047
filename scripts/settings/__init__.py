"""Settings of a training run: reading, checking and types."""
