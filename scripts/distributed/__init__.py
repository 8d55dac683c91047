"""Training with several processes: process group, collectives, DeepSpeed and FSDP config files, watchdog."""
