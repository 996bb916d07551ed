"""The small things that clients ask a server besides answers: which models there are, how long a text is, vectors of texts.

What is said is plausible and means nothing.
"""

from __future__ import annotations

import base64
import struct
from typing import Any

import blake3

from crab.turns.mock.chat import CREATED
from crab.turns.mock.conversation import Json
from crab.turns.mock.sse import dumps
from crab.turns.wires.shape import records

MODEL = "scripted"
DIMENSIONS = 16


def answer(method: str, path: str, family: str, body: Json) -> Json | None:
    """What a request that asks for no answer of a model gets; nothing if it is unknown. `family` is whose client asks."""
    end = path.rstrip("/").rpartition("/")[2]
    if method in ("GET", "HEAD"):
        if end == "models":
            return _models(family)
        if "/models/" in path:
            return _model(family, end)
        return {"status": "ok"} if method == "HEAD" or end in ("", "hello", "health") else None
    if end in ("count_tokens", "input_tokens"):
        return {"input_tokens": len(dumps(body)) // 4}
    if end.endswith(":countTokens"):
        return {"totalTokens": len(dumps(body)) // 4}
    if end.endswith(":embedContent"):
        return {"embedding": {"values": _vector(dumps(body.get("content")), DIMENSIONS)}}
    if end.endswith(":batchEmbedContents"):
        asked = [dumps(one.get("content")) for one in records(body.get("requests"))]
        return {"embeddings": [{"values": _vector(text, DIMENSIONS)} for text in asked]}
    return _embeddings(body) if end == "embeddings" else None


def _model(family: str, name: str) -> Json:
    if family == "anthropic":
        return {"type": "model", "id": name, "display_name": name, "created_at": "2023-11-14T22:13:20Z"}
    if family == "gemini":
        methods = ["generateContent", "countTokens", "embedContent"]
        limits = {"inputTokenLimit": 1_000_000, "outputTokenLimit": 64_000}
        return {"name": f"models/{name}", "displayName": name, "supportedGenerationMethods": methods} | limits
    return {"id": name, "object": "model", "created": CREATED, "owned_by": "crab"}


def _models(family: str) -> Json:
    listed = [_model(family, MODEL)]
    if family == "anthropic":
        return {"data": listed, "has_more": False, "first_id": MODEL, "last_id": MODEL}
    if family == "gemini":
        return {"models": listed}
    return {"object": "list", "data": listed, "models": []}  # Codex looks for the last one


def _embeddings(body: Json) -> Json:
    given, asked = body.get("input"), body.get("dimensions")
    size = min(asked, 4096) if isinstance(asked, int) and asked > 0 else DIMENSIONS
    texts: list[Any] = given if isinstance(given, list) and not all(isinstance(one, int) for one in given) else [given]
    vectors: list[Any] = [_vector(dumps(text), size) for text in texts]
    if body.get("encoding_format") == "base64":
        vectors = [base64.b64encode(struct.pack(f"<{size}f", *vector)).decode() for vector in vectors]
    data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)]
    used = len(dumps(given)) // 4
    return {
        "object": "list",
        "data": data,
        "model": body.get("model", MODEL),
        "usage": {"prompt_tokens": used, "total_tokens": used},
    }


def _vector(text: str, size: int) -> list[float]:
    """The same for the same text, of length one."""
    numbers = [byte - 127.5 for byte in blake3.blake3(text.encode(errors="replace")).digest(length=size)]
    length = sum(number * number for number in numbers) ** 0.5
    return [number / length for number in numbers]
