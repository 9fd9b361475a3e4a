"""Completions that obey a rule: compiled rules, matchers of running requests, their masks."""
