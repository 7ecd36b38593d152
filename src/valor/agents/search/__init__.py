"""Search: an index over a corpus, a server around it, and what agents ask it with."""
