"""swarmkit: train one PyTorch model with many badly connected machines."""

__version__ = "0.1.0"
