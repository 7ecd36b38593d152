"""Valor: value-oriented reinforcement learning for language models."""

__version__ = "0.2.0"
