"""Work directories that were deleted or renamed, an open folder read half, and a program in a chroot."""

import os
import shutil

from heartbeat import all_of, child, keep, scratch, talk

home = scratch()
shutil.rmtree("jail", ignore_errors=True)
for name in ("deleted", "before", "after"):
    shutil.rmtree(name, ignore_errors=True)
ASK = "while read line; do echo $(readlink /proc/self/cwd); done"
os.makedirs("deleted/below")
in_deleted = child("sh", "-c", ASK, cwd="deleted/below")
os.mkdir("before")
in_renamed = child("sh", "-c", ASK, cwd="before")
talk(in_deleted, b"?")
talk(in_renamed, b"?")
shutil.rmtree("deleted")
os.rename("before", "after")
os.makedirs("jail/tmp")
with open("jail/inside", "w") as f:
    f.write("inside the jail\n")
JAIL = f"""
import os, sys
os.chroot("{home}/jail"); os.chdir("/")
while line := sys.stdin.readline():
    print(*sorted(os.listdir("/")), os.getcwd(), os.path.exists("/etc"), flush=True)
"""
jailed = child("python3", "-c", JAIL)
entries = sorted(os.listdir("/usr/share/doc"))


def deleted(counter):
    said = talk(in_deleted, b"?")
    return (said.endswith(b"(deleted)") and b"deleted/below" in said) or said


def renamed(counter):
    said = talk(in_renamed, b"?")
    return said == f"{home}/after".encode() or said


def jail(counter):
    said = talk(jailed, b"?")
    return said == b"inside tmp / False" or said


keep(all_of(deleted=deleted, renamed=renamed, jail=jail))
