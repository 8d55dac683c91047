"""What several folders share: errors, paths, JSON files, the command line, the Hub, trackers, the run record."""
