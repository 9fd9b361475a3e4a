"""Engines: what runs the steps that the scheduler plans."""
