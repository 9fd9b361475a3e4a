"""The command line, run as a user runs it: as a process."""
