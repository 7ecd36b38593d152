"""One self-contained HTML page of a run, from the files in its folder, or of several runs."""
