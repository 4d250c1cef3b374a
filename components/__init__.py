"""Kubeflow components: each is a label on a step of `csc.steps`."""
