"""`python -m crab.turns.mock PORT`."""

from __future__ import annotations

from crab.turns.mock.serve import main

main()
