"""The settings of a training: read from flags and variables, checked, and typed."""
