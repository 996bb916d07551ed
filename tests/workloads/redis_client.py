"""Redis with an append-only file: one connection over TCP and one over a unix socket that live for ever, and a waiter."""

import os
import shutil
import socket
import subprocess
import threading

from heartbeat import all_of, keep, scratch, wait_for

home = scratch()
shutil.rmtree("data", ignore_errors=True)
os.mkdir("data")
with open("log", "w") as log:
    command = f"redis-server --port 6379 --bind 127.0.0.1 --unixsocket {home}/socket --dir {home}/data --appendonly yes"
    server = subprocess.Popen(command.split(), stdout=log, stderr=log, stdin=subprocess.DEVNULL)
wait_for(lambda: os.path.exists("socket"))
unix = socket.socket(socket.AF_UNIX)
unix.settimeout(20)
wait_for(lambda: unix.connect_ex("socket") == 0)
tcp = socket.create_connection(("127.0.0.1", 6379), timeout=20)
popped = []


def command(connection, *words):
    connection.sendall(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words))
    answer = b""
    while not answer.endswith(b"\r\n"):
        piece = connection.recv(4096)
        if not piece:
            raise EOFError("redis has closed the connection")
        answer += piece
    return answer[:-2]


def wait_for_values():
    connection = socket.create_connection(("127.0.0.1", 6379))
    while True:
        popped.append(command(connection, b"BLPOP", b"queue", b"0").split(b"\r\n")[-1])


threading.Thread(target=wait_for_values, daemon=True).start()


def count(counter):
    return command(tcp, b"INCR", b"tcp") == b":%d" % counter and command(unix, b"INCR", b"unix") == b":%d" % counter


def blocked(counter):
    command(unix, b"RPUSH", b"queue", b"%d" % counter)
    wait_for(lambda: popped, 20)
    found = popped.pop()
    return found == b"%d" % counter or found


def expiry(counter):
    if counter == 1:
        command(tcp, b"SET", b"long", b"x", b"EX", b"100000")
    command(tcp, b"SET", b"short", b"x", b"PX", b"1")
    wait_for(lambda: command(tcp, b"EXISTS", b"short") == b":0", 20)
    return command(tcp, b"EXISTS", b"long") == b":1"


keep(all_of(count=count, blocked=blocked, expiry=expiry))
