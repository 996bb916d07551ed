"""sshd with a login session on a terminal and a second one without: keys, privilege separation, a port forwarding."""

import os
import pty
import shutil
import socket
import subprocess
import threading

from heartbeat import all_of, child, keep, read_until, scratch, talk, wait_for

PORT, FORWARD, TARGET = 2222, 2223, 2224
home = scratch()
os.chmod("/tmp/work", 0o755)
os.makedirs("/run/sshd", mode=0o755, exist_ok=True)
for name in ("host", "user"):
    for end in ("", ".pub"):
        if os.path.exists(name + end):
            os.unlink(name + end)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", name], check=True)
shutil.copyfile("user.pub", "authorized")
os.chmod("authorized", 0o600)
with open("config", "w") as f:
    f.write(f"""
Port {PORT}
ListenAddress 127.0.0.1
HostKey {home}/host
AuthorizedKeysFile {home}/authorized
StrictModes no
UsePAM no
PermitRootLogin yes
PidFile none
""")
with open("log", "w") as log:
    server = subprocess.Popen(["/usr/sbin/sshd", "-D", "-e", "-f", f"{home}/config"], stderr=log)
listening = socket.socket()
wait_for(lambda: socket.socket().connect_ex(("127.0.0.1", PORT)) == 0)
options = (
    f"-i {home}/user -p {PORT} -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR".split()
)
pid, terminal = pty.fork()
if pid == 0:
    os.execvp("ssh", ["ssh", "-tt", *options, "root@127.0.0.1", "exec bash --norc --noprofile -i"])
os.write(terminal, b"PS1=; bind 'set enable-bracketed-paste off'; stty -echo; export KEPT=yes; echo 'rea''dy'\n")
read_until(terminal, b"ready", 30)
listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listening.bind(("127.0.0.1", TARGET))
listening.listen()


def echo():
    while True:
        connection, _ = listening.accept()
        with connection:
            while data := connection.recv(4096):
                connection.sendall(data)


threading.Thread(target=echo, daemon=True).start()
plain = child(
    "ssh", "-L", f"{FORWARD}:127.0.0.1:{TARGET}", *options, "root@127.0.0.1", "while read line; do echo got $line; done"
)
talk(plain, b"first")
wait_for(lambda: socket.socket().connect_ex(("127.0.0.1", FORWARD)) == 0)
through = socket.create_connection(("127.0.0.1", FORWARD), timeout=20)


def session(counter):
    os.write(terminal, b"tty; echo $KEPT-%d-$((%d * 2))\n" % (counter, counter))
    text = read_until(terminal, b"yes-%d-%d" % (counter, counter * 2), 20)
    return b"/dev/pts/" in text


def forwarded(counter):
    through.sendall(b"%08d" % counter)
    return through.recv(8) == b"%08d" % counter


keep(all_of(session=session, plain=lambda n: talk(plain, b"%d" % n) == b"got %d" % n, forwarded=forwarded))
