"""The commands: what each takes from the shell, and what it starts with it."""
