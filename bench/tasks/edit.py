#!/usr/bin/env python3
"""`edit FILE OLD NEW` puts one text in the place of another that stands in a file exactly once. Runs in the sandbox."""

import sys

path, old, new = sys.argv[1:]
with open(path, encoding="utf-8") as file:
    text = file.read()
if text.count(old) != 1:
    sys.exit(f"edit: {path} has that text {text.count(old)} times, expected once")
with open(path, "w", encoding="utf-8") as file:
    file.write(text.replace(old, new))
