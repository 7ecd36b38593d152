"""The demo and experiments: whole runs put together through the ordinary entry points."""
