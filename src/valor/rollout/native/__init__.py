"""The native engine: batched sampling with transformers, beside the actor with the actor's own weights."""
