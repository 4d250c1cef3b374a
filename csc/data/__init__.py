"""From annotations to batches."""
