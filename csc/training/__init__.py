"""Training of one task."""
