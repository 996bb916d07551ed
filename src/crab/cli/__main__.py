"""`python -m crab.cli` is `crab`."""

from crab.cli import main

main()
