"""The parts of `quantization.py`: one file a claim; peers run them without LeZero."""
