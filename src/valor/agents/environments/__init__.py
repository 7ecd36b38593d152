"""Text environments that exist elsewhere, each behind the same four methods."""
