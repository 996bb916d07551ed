"""Undoes two fixes in cachetools, as a careless change would have: what the story has to repair."""

import pathlib

source = pathlib.Path("src/cachetools/__init__.py")
text = source.read_text()
for good, bad in (
    # evicts on updates, too
    (
        "        if key not in self.__data or self.__size[key] < size:\n            while self.__currsize + size > maxsize:\n"
        "                self.popitem()\n",
        "        while self.__currsize + size > maxsize:\n            self.popitem()\n",
    ),
    # keeps items one tick too long
    ("while curr is not root and not (time < curr.expires):", "while curr is not root and time > curr.expires:"),
):
    if good not in text:
        raise SystemExit(f"{source} is not that of the version that this story is about")
    text = text.replace(good, bad)
source.write_text(text)
