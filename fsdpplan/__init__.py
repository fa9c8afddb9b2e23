"""Plan distributed PyTorch training: layout, launch script, run, and check of the prediction."""

__version__ = "0.1.0"
