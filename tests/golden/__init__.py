"""Compiled pipelines as they were last reviewed."""
