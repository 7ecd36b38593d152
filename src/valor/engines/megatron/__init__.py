"""The training engine by megatron-core (`strategy=megatron`): tensor, pipeline, context and expert parallel."""
