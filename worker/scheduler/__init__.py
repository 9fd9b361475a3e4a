"""Decides what each step computes. Standard library and numpy only."""
