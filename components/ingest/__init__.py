"""The ingest component."""
