"""`python -m valor.config` prints the text of docs/configuration.md."""

from valor.config.document import render_docs

if __name__ == "__main__":
    print(render_docs(), end="")
