"""vLLM in the trainer's processes, and what a vLLM server needs to take weights."""
