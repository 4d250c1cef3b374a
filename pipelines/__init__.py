"""Kubeflow pipelines: how they are made and compiled, and how they run here or on a cluster."""
