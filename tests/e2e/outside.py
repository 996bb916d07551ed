"""A machine outside, as far as a sandbox can tell: a network namespace of its own behind a veth pair, with servers in it.

It has a route to the host only, so an answer to a sandbox comes back because the host translated the address.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FORWARD = Path("/proc/sys/net/ipv4/ip_forward")

SERVER = """
import http.server, os, socket, sys, threading

class Hello(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        text = f"outside {self.client_address[0]}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
    def log_message(self, *_):
        pass

def say(*words):
    print(*words, flush=True)

def hold(connection, number):
    while True:
        try:
            data = connection.recv(4096)
        except OSError as error:
            return say("end", number, error.strerror.replace(" ", "-"))
        if not data:
            return say("end", number, "closed")
        say("got", number, data.decode().strip())

def keep():
    listener = socket.create_server(("0.0.0.0", 9000))
    number = 0
    while True:
        connection, _ = listener.accept()
        number += 1
        say("begin", number)
        threading.Thread(target=hold, args=(connection, number), daemon=True).start()

threading.Thread(target=keep, daemon=True).start()
http.server.ThreadingHTTPServer(("0.0.0.0", 8000), Hello).serve_forever()
"""


class Outside:
    """The machine. Port 8000 answers `outside ADDRESS-OF-THE-CLIENT`; port 9000 keeps connections and says what they do."""

    def __init__(self, namespace: str, address: str, host: str, server: subprocess.Popen[str], log: Path) -> None:
        self.namespace = namespace
        self.address = address
        self.host = host
        """Address of the host on the way to it."""
        self._server = server
        self._log = log

    def said(self, *words: str) -> list[list[str]]:
        """Lines of port 9000 that begin with those words."""
        lines = [line.split() for line in self._log.read_text().splitlines()]
        return [line for line in lines if line[: len(words)] == list(words)]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextmanager
def outside(folder: Path) -> Iterator[Outside]:
    """Such a machine for the length of the block. IP forwarding of the host is as before afterwards."""
    before = FORWARD.read_text()
    name, link = "crab-test-outside", "to-outside"
    subprocess.run(["ip", "netns", "delete", name], capture_output=True)  # of a run that was killed
    subprocess.run(["ip", "link", "delete", link], capture_output=True)
    _ip("netns", "add", name)
    try:
        _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("address", "add", "198.51.100.1/30", "dev", link)
        _ip("link", "set", link, "up")
        for words in ("link set lo up", "address add 198.51.100.2/30 dev eth0", "link set eth0 up"):
            _ip("-netns", name, *words.split())
        log = folder / "outside.log"
        with log.open("w") as output:
            words = ["ip", "netns", "exec", name, sys.executable, "-c", SERVER]
            server = subprocess.Popen(words, stdout=output, text=True)
        try:
            machine = Outside(name, "198.51.100.2", "198.51.100.1", server, log)
            end = time.monotonic() + 30
            while subprocess.run(
                ["ip", "netns", "exec", name, "bash", "-c", "echo >/dev/tcp/127.0.0.1/8000"], capture_output=True
            ).returncode:
                assert time.monotonic() < end, "the server outside does not come up"
                time.sleep(0.05)
            yield machine
        finally:
            server.kill()
            server.wait()
    finally:
        subprocess.run(["ip", "link", "delete", link], capture_output=True)
        _ip("netns", "delete", name)
        tables = subprocess.run(["nft", "list", "tables"], capture_output=True, text=True).stdout
        if before.strip() == "0" and "crab_" not in tables:
            FORWARD.write_text("0")
