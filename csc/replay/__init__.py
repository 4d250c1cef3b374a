"""What is kept of earlier tasks, and how it is chosen."""
