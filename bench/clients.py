"""Real clients in an image, each told by a scripted model to run three commands: did it come to its end, and were they run once?

The image is called `agents` and is made by hand (docs/clients.md); a client that it lacks is no error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import crab
from bench.asking import python_path
from bench.figures import say

IMAGE = "agents"
STEPS = ["one", "two", "three"]
PROMPT = " ;; ".join([*(f"$ echo {step} >>/root/work/log" for step in STEPS), "> all done"])
CODEX = """
mkdir -p ~/.codex; cat >~/.codex/config.toml <<END
model = "gpt-5-codex"
model_provider = "crab"
check_for_update_on_startup = false
[model_providers.crab]
name = "crab"
base_url = "$OPENAI_BASE_URL"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
END
codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox --json "$PROMPT"
"""
GEMINI = """
mkdir -p ~/.gemini; cat >~/.gemini/settings.json <<END
{"privacy": {"usageStatisticsEnabled": false}, "general": {"enableAutoUpdate": false},
 "security": {"auth": {"selectedType": "gemini-api-key"}}}
END
gemini -p "$PROMPT" --yolo --skip-trust --model gemini-2.5-pro
"""
OPENCODE = """
mkdir -p ~/.config/opencode; cat >~/.config/opencode/opencode.json <<END
{"autoupdate": false, "share": "disabled", "model": "crab/m", "small_model": "crab/m",
 "provider": {"crab": {"npm": "@ai-sdk/openai-compatible", "name": "crab",
   "options": {"baseURL": "$OPENAI_BASE_URL", "apiKey": "$OPENAI_API_KEY"}, "models": {"m": {"name": "m"}}}},
 "permission": {"edit": "allow", "bash": "allow", "webfetch": "deny"}}
END
OPENCODE_DISABLE_AUTOUPDATE=1 OPENCODE_DISABLE_MODELS_FETCH=1 OPENCODE_DISABLE_LSP_DOWNLOAD=1 opencode run "$PROMPT" --format json
"""
MINI = """
MSWEA_CONFIGURED=true MSWEA_COST_TRACKING=ignore_errors LITELLM_LOCAL_MODEL_COST_MAP=True \
mini -m openai/gpt-4o -t "$PROMPT" -y --exit-immediately -o /root/traj.json
"""
CLIENTS = {
    "claude": 'claude -p "$PROMPT" --dangerously-skip-permissions --output-format json',
    "codex": CODEX,
    "opencode": OPENCODE,
    "gemini": GEMINI,
    "mini": MINI,
}
"""By the name of their program."""
SLOW = ("gemini",)
"""Not in a quick run, unless asked for: it needs five seconds until it does anything."""
SECONDS = 60


def matrix(host: crab.Host, socket: Path, names: list[str]) -> dict[str, str] | str:
    """What became of each client: `ran`, `not installed`, or why it did not."""
    if all(image.name != IMAGE for image in host.images.list()):
        return f"image {IMAGE} missing"
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(names, pool.map(lambda name: _ran(host, socket, name), names), strict=True))


def _ran(host: crab.Host, socket: Path, name: str) -> str:
    say(f"client {name}")
    box = f"bench-{name}"
    script = f"command -v {name} >/dev/null || exit 97; mkdir -p /root/work; cd /root/work; {CLIENTS[name]}"
    words = [sys.executable, "-m", "crab.cli", "--socket", str(socket), "run", "--name", box, "--image", IMAGE]
    words += ["--upstream", "mock", "--env", f"PROMPT={PROMPT}", "--", "sh", "-c", script]
    try:
        done = subprocess.run(
            words, env=os.environ | {"PYTHONPATH": python_path()}, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, timeout=SECONDS,
        )  # fmt: skip
        if done.returncode == 97:
            return "not installed"
        if done.returncode:
            return f"status {done.returncode}: {json.dumps((done.stdout + done.stderr)[-300:])}"
        log = host.sandbox(box).run("cat /root/work/log").stdout.decode().split()
        return "ran" if log == STEPS else f"its commands left {log}"
    except subprocess.TimeoutExpired:
        return f"not done within {SECONDS} s"
    finally:
        for sandbox in host.sandboxes():
            if sandbox.name == box:
                sandbox.remove(force=True)
