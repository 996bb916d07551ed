"""An HTTP server under load: clients with new connections, one with a connection that it keeps, one that posts."""

import http.client
import http.server
import os
import subprocess
import sys
import threading
import time

from heartbeat import all_of, keep, scratch, wait_for

PORT = 8123
if sys.argv[1:] == ["serve"]:

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            body = (self.path * 1000).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self):
            self.path = str(sum(self.rfile.read(int(self.headers["Content-Length"])))) + "/"
            self.do_GET()

        def log_message(self, *arguments):
            pass

    class Server(http.server.ThreadingHTTPServer):
        request_queue_size = 128

    Server(("127.0.0.1", PORT), Handler).serve_forever()

scratch()
server = subprocess.Popen([sys.executable, __file__, "serve"])
answers, failures = [0, 0], []


def get(connection, path):
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status == 200 and answer.read() == path.encode() * 1000


def client(me):
    number = 0
    while True:
        number += 1
        connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=60)
        try:
            if not get(connection, f"/{me}/{number}"):
                failures.append(f"client {me}: a wrong answer to {number}")
        except OSError as error:
            failures.append(f"client {me}, request {number}: {error!r}")
        connection.close()
        answers[me] += 1
        time.sleep(0.01)


def up():
    try:
        return get(http.client.HTTPConnection("127.0.0.1", PORT, timeout=5), "/up")
    except OSError:
        return False


wait_for(up)
for number in range(2):
    threading.Thread(target=client, args=(number,), daemon=True).start()
kept = http.client.HTTPConnection("127.0.0.1", PORT, timeout=60)
kept.connect()
kept_socket = kept.sock


def clients(counter):
    before = list(answers)
    wait_for(lambda: all(new > old for new, old in zip(answers, before, strict=True)), 60)
    return failures[0] if failures else True


def same_connection(counter):
    return get(kept, f"/kept/{counter}") and kept.sock is kept_socket


def post(counter):
    data = os.urandom(100000)
    kept.request("POST", "/", data)
    return kept.getresponse().read().startswith(b"%d/" % sum(data))


keep(all_of(clients=clients, kept=same_connection, post=post))
