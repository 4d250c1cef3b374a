"""Multi-label class-incremental learning with Confidence Self-Calibration (CSC)."""

__version__ = "0.1.0"
