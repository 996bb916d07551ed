"""nginx: a master of root, workers of www-data that serve files, a kept connection, and reloads in between."""

import http.client
import os
import subprocess

from heartbeat import all_of, keep, scratch, wait_for

PORT = 8124
home = scratch()
os.chmod("/tmp/work", 0o755)
with open("nginx.conf", "w") as f:
    f.write(f"""
user www-data;
worker_processes 2;
pid {home}/nginx.pid;
error_log {home}/error.log;
events {{ worker_connections 64; }}
http {{
    access_log {home}/access.log;
    server {{ listen 127.0.0.1:{PORT}; root {home}; location / {{ }} }}
}}
""")
with open("page", "w") as f:
    f.write("a page\n" * 1000)
nginx = subprocess.Popen(["nginx", "-c", f"{home}/nginx.conf", "-g", "daemon off;"], stdout=subprocess.DEVNULL)


def get(connection):
    connection.request("GET", "/page")
    answer = connection.getresponse()
    return answer.status == 200 and answer.read() == b"a page\n" * 1000


def fresh():
    try:
        connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=20)
        good = get(connection)
        connection.close()
        return good
    except OSError:
        return False


wait_for(fresh)
kept = http.client.HTTPConnection("127.0.0.1", PORT, timeout=20)


def children():
    with open(f"/proc/{nginx.pid}/task/{nginx.pid}/children") as f:
        return set(f.read().split())


def users():
    return sorted(os.stat(f"/proc/{pid}").st_uid for pid in children())


def workers(counter):
    wait_for(lambda: users() == [33, 33], 20)
    return os.stat(f"/proc/{nginx.pid}").st_uid == 0


def kept_connection(counter):
    if counter % 100 == 1:
        kept.close()  # nginx itself ends a connection after 1000 requests, and on a reload
    return get(kept)


def reload(counter):
    if counter % 50 == 0:
        kept.close()
        old = children()
        subprocess.run(["nginx", "-c", f"{home}/nginx.conf", "-s", "reload"], check=True)
        wait_for(lambda: not children() & old and len(children()) == 2, 20)
    return True


keep(all_of(fresh=lambda n: fresh() or "no answer", kept=kept_connection, workers=workers, reload=reload))
