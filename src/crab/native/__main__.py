"""`python -m crab.native`: build the C programs, and those for the kernel, that are not up to date."""

import sys

from crab.errors import CrabError
from crab.native import bpf, build

try:
    build()
    bpf.build()
except CrabError as error:
    sys.exit(str(error))
