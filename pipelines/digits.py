"""The pipeline of digits-b0c2 as a file for kfp: `kfp dsl compile --py pipelines/digits.py --output digits.yaml`."""

from csc.pipelines.scenario import build_pipeline
from csc.scenario import Scenario

digits_b0c2 = build_pipeline(Scenario.parse("digits-b0c2"), classes=10, on_cluster=True)
