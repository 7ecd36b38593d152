"""Prompts on their way into a run: files, tokens, order, checks; and the batch that travels between roles."""
