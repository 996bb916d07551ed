"""`Host`, `Sandbox`, `Process` and their asynchronous twins.

The same calls in this process (`Host`) or over the daemon's socket (`connect`). Import the names from `crab`.
"""
