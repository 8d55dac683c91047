"""How a model is spread over processes: the ranks and their group, DeepSpeed's and FSDP's files, what FSDP did."""
