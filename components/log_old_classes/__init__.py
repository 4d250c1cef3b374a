"""The log_old_classes component."""
