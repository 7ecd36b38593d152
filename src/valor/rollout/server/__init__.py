"""Generation by OpenAI-compatible servers that are running already."""
