"""The prior component."""
