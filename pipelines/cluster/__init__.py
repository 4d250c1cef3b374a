"""Runs on a Kubeflow cluster."""
