"""Hugging Face models as policies and value functions: loading, forward passes over compact rows, export."""
