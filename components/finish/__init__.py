"""The finish component."""
