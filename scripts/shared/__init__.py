"""Modules that several folders use: errors and exit codes, paths, JSON files, the Hub, experiment trackers."""
