"""Multi-label class-incremental learning with Confidence Self-Calibration (CSC)."""

import os

__version__ = "0.1.0"

# Set before anything imports torch: its threads must not spin while they wait, or two trainings that share the cores
# would each take many times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
