"""Tests and benches."""
