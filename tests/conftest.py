"""What all tests share."""

import os

# Tests run in several processes; threads of each would fight for the same cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
# Some virtual machines announce AMX and end whoever uses it; bfloat16 needs none of it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
