"""Parts of models: a GPT small enough to read, LoRA by hand, BLOOM with fused attention, and the chunked loss."""
