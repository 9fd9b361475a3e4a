"""Benches: each prints where it ran, its figures, and one last line of JSON."""
