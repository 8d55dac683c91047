"""Training with several processes: strategies, process group, config files, tensor parallelism, watchdog."""
