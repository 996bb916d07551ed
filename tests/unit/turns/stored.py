"""A look at what the record stores, past all that it says of it."""

from __future__ import annotations

from crab.turns.record import Record


def loose(record: Record) -> list[bytes]:
    """What is stored and nothing refers to, found by looking through everything."""
    nodes = """
        WITH RECURSIVE used (id) AS (
            SELECT key FROM exchanges
            UNION SELECT nodes.parent FROM nodes JOIN used ON nodes.id = used.id WHERE nodes.parent IS NOT NULL
        ) SELECT id FROM nodes WHERE id NOT IN (SELECT id FROM used)
    """
    content = """
        SELECT digest FROM blobs WHERE digest NOT IN (
            SELECT item FROM nodes
            UNION SELECT answer FROM exchanges WHERE answer IS NOT NULL
            UNION SELECT result FROM outcomes WHERE result IS NOT NULL
        )
    """
    with record._database.read() as db:
        return [row[0] for query in (nodes, content) for row in db.execute(query)]
