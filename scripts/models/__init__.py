"""Parts of models: a GPT small enough to read, LoRA by hand, BLOOM with SDPA, the chunked loss, no padding."""
