"""The daemon's process: owns a state directory, serves the API, and can go at any time without a sandbox noticing.

`serve` runs in the foreground until SIGTERM or SIGINT; whoever starts it (systemd, a terminal) sees to the rest. `stop`
ends a daemon that answers on a socket. Knows nothing of the API itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import select
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from crab.daemon.client import SocketTransport
from crab.daemon.requests import Drain, StoreRequest, Version
from crab.errors import Busy, HostUnsuitable
from crab.store.retention import Policy

if TYPE_CHECKING:
    from crab.daemon.service import Service

DRAIN_SECONDS = 20.0
"""How long calls under way may go on after SIGTERM. A capture or restore takes far less."""

log = logging.getLogger("crab.daemon")


def serve(
    state_dir: Path,
    socket_path: Path,
    drain_seconds: float = 0.0,
    store: StoreRequest | None = None,
    keep: Policy | None = None,
) -> None:
    """Run the daemon until SIGTERM or SIGINT. Raises `Busy`, `HostUnsuitable` and others if it cannot start.

    With `drain_seconds` every running sandbox is made safe before it ends, as far as that time allows; with `store` the newest
    checkpoints are sent there as they come; with `keep` others than those are removed.
    """
    from crab.daemon.server import listen
    from crab.daemon.service import Service  # it brings in everything below; `stop` does without

    logging.basicConfig(level=logging.INFO, format="crab: %(message)s")
    _many_descriptors()
    listener = listen(socket_path)
    try:
        with contextlib.ExitStack() as stack:
            service = stack.enter_context(Service.open(state_dir))
            for one in service.background(store, keep):
                stack.enter_context(one)
            drain = Drain(
                seconds=drain_seconds, store=store.url if store else "", key_file=store.key_file if store else ""
            )
            asyncio.run(_serve(service, listener, socket_path, drain if drain_seconds else None))
    finally:
        listener.close()
        with contextlib.suppress(FileNotFoundError):
            socket_path.unlink()


def leave() -> None:
    """End the process now. Threads may still wait for commands to end: the commands are none of their concern."""
    logging.shutdown()
    os._exit(0)


async def _serve(service: Service, listener: socket.socket, socket_path: Path, drain: Drain | None) -> None:
    from aiohttp import web

    from crab.daemon.server import Server

    end = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end.set)
    server = Server(service)
    runner = web.AppRunner(server.application(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    notify(f"READY=1\nSTATUS=serving {service.state_dir}")
    log.info("serving %s on %s", service.state_dir, socket_path)
    try:
        await end.wait()
        notify("STOPPING=1")
        if drain:
            log.info("making every sandbox safe, for %g s at most", drain.seconds)
            await asyncio.to_thread(service.handle, drain)
        log.info("stopping; sandboxes run on")
        for site in list(runner.sites):
            await site.stop()
        await server.drain(DRAIN_SECONDS)
    finally:
        server.close()
        await runner.cleanup()


def notify(text: str) -> None:
    """Tell systemd (sd_notify(3)), if it wants to know."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.sendto(text.encode(), "\0" + address[1:] if address.startswith("@") else address)


def _many_descriptors() -> None:
    """Each command that is read takes three descriptors; the usual limit of 1024 would be few."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def stop(socket_path: Path, seconds: float = DRAIN_SECONDS + 10) -> Version:
    """End the daemon that answers on the socket; returns who it was. Sandboxes run on.

    Raises `DaemonUnavailable` if none answers, `Busy` if it does not end in time, `HostUnsuitable` if it may not be ended.
    """
    found = SocketTransport(socket_path).about()
    try:
        process = os.pidfd_open(found.pid)
    except ProcessLookupError:
        return found
    try:
        signal.pidfd_send_signal(process, signal.SIGTERM)
        waiter = select.poll()
        waiter.register(process, select.POLLIN)
        if not waiter.poll(seconds * 1000):
            raise Busy(
                f"the daemon (process {found.pid}) has not ended after {seconds:.0f} s",
                remedy="try again; kill -9 is safe for sandboxes",
            )
    except ProcessLookupError:
        pass
    except PermissionError:
        raise HostUnsuitable(
            f"the daemon (process {found.pid}) can be ended by root only", remedy="run it with sudo"
        ) from None
    finally:
        os.close(process)
    return found
