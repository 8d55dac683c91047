"""How a model is spread over processes: process group and ranks, DeepSpeed's and FSDP's files, strategies, watchdog."""
