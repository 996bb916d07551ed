"""Calls a tool at the door of the sandbox, as a client of MCP does; prints what it says. Needs nothing but Python.

    python3 tools.py TOOL [JSON]

Finds the door by $CRAB_TOOLS. If its stream is cut it asks for the rest, as the official clients do.
"""

import http.client
import json
import os
import sys
import time
import urllib.parse

URL = urllib.parse.urlsplit(os.environ.get("CRAB_TOOLS", "http://127.0.0.1:2722/crab/mcp"))
HEADERS = {
    "Accept": "application/json, text/event-stream",
    "Content-Type": "application/json",
    "MCP-Protocol-Version": "2025-11-25",
}


def request(method, body=None, headers=()):
    line = http.client.HTTPConnection(URL.hostname, URL.port, timeout=120)
    line.request(method, URL.path, body, {**HEADERS, **dict(headers)})
    answer = line.getresponse()
    if answer.status != 200:
        raise SystemExit(f"{answer.status} {answer.read()!r}")
    return answer


def message(answer, state):
    """The message at the end of a stream."""
    while True:
        line = answer.readline().decode()
        if not line:
            raise ConnectionError("the stream was cut")
        field, _, value = line.rstrip("\n").partition(":")
        if field == "id":
            state["event"] = value.strip()
        elif field == "data" and value.strip():
            return json.loads(value)


def call(tool, arguments):
    state = {}
    asked = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": tool, "arguments": arguments}}
    try:
        return message(request("POST", json.dumps(asked)), state)
    except (OSError, http.client.HTTPException):
        time.sleep(0.2)
        return message(request("GET", None, {"Last-Event-ID": state["event"]}), state)


if __name__ == "__main__":
    said = call(sys.argv[1], json.loads(sys.argv[2]) if len(sys.argv) > 2 else {})
    result = said.get("result") or {"isError": True, "content": [{"text": json.dumps(said)}]}
    print(("failed: " if result["isError"] else "") + result["content"][0]["text"])
