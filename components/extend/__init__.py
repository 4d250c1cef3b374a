"""The extend component."""
