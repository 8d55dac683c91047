"""What a model needs, in bytes and operations, found without memory for it."""
