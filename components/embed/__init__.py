"""The embed component."""
