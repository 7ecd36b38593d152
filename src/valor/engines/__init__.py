"""Training engines: a sharded model behind a few verbs, its micro-batches, optimizer and checkpoints."""
