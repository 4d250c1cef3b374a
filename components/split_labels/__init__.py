"""The split_labels component."""
