"""Runs of compiled pipelines on this machine."""
