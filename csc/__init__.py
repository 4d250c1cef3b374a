"""Multi-label class-incremental learning with Confidence Self-Calibration (CSC)."""

import os

__version__ = "0.1.0"

# Before anything imports torch: its threads must not spin while they wait. Where two trainings share the cores, each
# would take many times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
