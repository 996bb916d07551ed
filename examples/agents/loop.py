"""The smallest agent: asks, runs what it is told to, asks again. For trying out, and for tests; needs nothing but Python.

    python3 loop.py URL PROMPT [COMMAND …]

With COMMAND it runs what it is told by that (`crab exec BOX -- sh -c`), else itself. Keeps asking while nobody answers, as
real clients do.
"""

import http.client
import json
import os
import subprocess
import sys
import time
import urllib.parse

TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
PATIENCE = 60.0


def ask(url, messages):
    """The model's message, whatever it takes."""
    parts = urllib.parse.urlsplit(url)
    body = json.dumps({"model": "scripted", "messages": messages, "tools": [TOOL], "stream": False})
    key = os.environ.get("OPENAI_API_KEY", "sk-none")
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    end = time.monotonic() + PATIENCE
    while True:
        try:
            line = http.client.HTTPConnection(parts.hostname, parts.port, timeout=PATIENCE)
            line.request("POST", f"{parts.path}/v1/chat/completions", body, headers)
            answer = line.getresponse()
            data = answer.read()
            if answer.status == 200:
                return json.loads(data)["choices"][0]["message"]
            why = f"{answer.status} {data[:200]!r}"
        except (OSError, http.client.HTTPException, ValueError) as error:
            why = repr(error)
        if time.monotonic() > end:
            raise SystemExit(f"no answer: {why}")
        time.sleep(0.05)


def main(url, prompt, runner):
    messages = [{"role": "system", "content": "You act by commands."}, {"role": "user", "content": prompt}]
    while True:
        message = ask(url, messages)
        messages.append(message)
        if not message.get("tool_calls"):
            print(message["content"], flush=True)
            return
        for call in message["tool_calls"]:
            command = json.loads(call["function"]["arguments"])["command"]
            argv = [*runner, command] if runner else ["sh", "-c", command]
            done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
            text = f"{done.stdout.decode(errors='replace')}\nstatus {done.returncode}"
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
