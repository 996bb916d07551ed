"""Everything that can change the state of a sandbox, one small function each, and what each changes.

The matrix that an inspector of changes is measured by. An operation has two phases: `prepare`, before the moment from which
changes count, and `act`, the turn. Both get the folder (with the files of `lay_out` in it) and a dict that goes from one to the
other. They run in children of `Runner`, which a caller puts where it wants them (a cgroup, a namespace) by its `enter`.

What counts as a change is the *net* difference: names, types, modes, owners, contents, link targets, extended attributes and
flags of files; and of processes and kernel objects all that a program could find out, their inode numbers, times and use of
processor time excepted. So what is written and taken back is no change, and neither are times alone.

Knows nothing of inspectors or sandboxes; standard library and system calls only (x86-64 and arm64 share none of the numbers
below, so it is for x86-64).
"""

from bench.operations import on_attributes, on_content, on_names, on_objects, on_processes
from bench.operations.on_attributes import flags_of
from bench.operations.operation import MACHINE, OPERATIONS, Operation, checked, lay_out, libc
from bench.operations.running import Runner

TABLES = (on_content, on_names, on_attributes, on_objects, on_processes)
"""The modules that add to `OPERATIONS`."""

__all__ = ["MACHINE", "OPERATIONS", "TABLES", "Operation", "Runner", "checked", "flags_of", "lay_out", "libc"]
