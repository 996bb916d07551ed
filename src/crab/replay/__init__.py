"""Recorded agents run again: turn by turn in a sandbox, killed on purpose, and compared with an undisturbed run."""
