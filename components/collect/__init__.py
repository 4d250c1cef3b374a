"""The collect component."""
