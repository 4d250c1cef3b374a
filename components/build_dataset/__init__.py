"""The build_dataset component."""
