"""Is an answer to a mathematics problem the right one? Reading LaTeX and plain text, and comparing what was read."""
