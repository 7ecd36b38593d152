"""FSDP2: a model sharded over the ranks by torch, with sequence parallelism inside a data-parallel rank."""
