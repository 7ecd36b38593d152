"""The first half of a step: prompts → episodes → grades → a batch for the trainer."""
