"""Kubeflow pipelines, and the commands that compile and run them."""
