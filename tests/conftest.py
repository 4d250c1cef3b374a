"""What all tests share."""

import os

# Tests run in several processes; threads of each would fight for the same cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
