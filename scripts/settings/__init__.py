"""Settings of a training: reading, checking and types."""
