"""A finished scenario run as something to look at: tables, figures, one page."""
