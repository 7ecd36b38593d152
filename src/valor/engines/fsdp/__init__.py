"""FSDP2: a model sharded over the ranks by torch, with tensor or sequence parallelism inside a data-parallel rank."""
