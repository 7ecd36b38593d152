"""The phases of a training step, one file each; `standard.py` lists them in order."""
