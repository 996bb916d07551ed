"""Measurements of what Crab costs. Each module is a command: `python -m bench.NAME [--quick] [--json]`."""
