"""The train component."""
