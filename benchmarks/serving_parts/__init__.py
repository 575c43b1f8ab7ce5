"""The parts of `serving.py` that need a server: one file a claim."""
