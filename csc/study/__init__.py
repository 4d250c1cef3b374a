"""Studies: a grid of scenario runs, and the table that comes out of it, with the paper's numbers next to ours."""
