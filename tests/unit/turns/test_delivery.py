"""A delivery: whoever asks for it gets all of it, whenever he comes."""

from __future__ import annotations

import asyncio

import pytest
from unit.turns.stack import aio, until

from crab.turns import delivery as deliveries
from crab.turns.delivery import Broken, Delivery
from crab.turns.wires.wire import Part, Piece


async def all_of(delivery: Delivery, ping: bytes = b"") -> bytes:
    return b"".join([data async for data in delivery.follow(ping)])


@aio
async def test_all_who_follow_get_the_same_bytes_and_nobody_misses_one() -> None:
    delivery = Delivery(safe=True)
    delivery.begin(200, [])
    readers = [asyncio.create_task(all_of(delivery)) for _ in range(3)]
    for number in range(50):
        delivery.arrived(Piece(b"%d," % number, Part.TEXT if number < 30 else Part.CALL))
        if number % 3 == 0:
            await asyncio.sleep(0)
        if number == 25:
            readers.append(asyncio.create_task(all_of(delivery)))
    delivery.ended(True)
    delivery.recorded()
    readers.append(asyncio.create_task(all_of(delivery)))
    assert set(await asyncio.gather(*readers)) == {b"".join(b"%d," % number for number in range(50))}


@aio
async def test_who_waits_for_a_head_that_never_comes_hears_it() -> None:
    delivery = Delivery()
    waits = [asyncio.create_task(delivery.head()) for _ in range(2)]
    await asyncio.sleep(0)
    delivery.finish(broken=True)
    assert [type(error) for error in await asyncio.gather(*waits, return_exceptions=True)] == [Broken, Broken]
    with pytest.raises(Broken):
        await all_of(delivery)


@aio
async def test_a_delivery_that_was_broken_is_not_mended_by_what_comes_later() -> None:
    delivery = Delivery()
    delivery.begin(200, [])
    delivery.arrived(Piece(b"call", Part.CALL))
    delivery.ended(True)
    delivery.finish(broken=True)
    delivery.recorded()
    delivery.settled()
    with pytest.raises(Broken):
        await all_of(delivery)
    assert not delivery.is_holding


@aio
async def test_pings_come_while_something_is_held_and_not_while_the_model_thinks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deliveries, "PING_SECONDS", 0.01)
    delivery, got = Delivery(), list[bytes]()
    delivery.begin(200, [])

    async def read() -> None:
        async for data in delivery.follow(b"ping"):
            got.append(data)

    task = asyncio.create_task(read())
    delivery.arrived(Piece(b"text", Part.TEXT))
    await asyncio.sleep(0.06)
    assert got == [b"text"]
    delivery.arrived(Piece(b"call", Part.CALL))
    await until(lambda: got.count(b"ping") >= 2)
    delivery.ended(True)
    delivery.recorded()
    delivery.settled()
    await task
    assert got[0] == b"text" and got[-1] == b"call" and set(got[1:-1]) == {b"ping"}


@aio
async def test_who_got_all_is_told_once_it_is_out() -> None:
    delivery, told = Delivery(), list[int]()
    delivery.taken()  # nobody listens
    delivery.when_taken = lambda: told.append(1)
    delivery.taken()
    assert told == [1]


@aio
async def test_the_end_is_waited_for_by_whoever_wants_it() -> None:
    delivery = Delivery()
    waits = asyncio.create_task(delivery.over())
    delivery.begin(200, [])
    delivery.give(b"a")
    await asyncio.sleep(0.01)
    assert not waits.done()
    delivery.finish()
    await asyncio.wait_for(waits, 1)
    await delivery.over()
