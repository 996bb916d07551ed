"""Processes of other users: by su, by setuid in a child, with supplementary groups and capabilities of their own."""

import os

from heartbeat import all_of, child, keep, talk
from kernel import call

PR_SET_KEEPCAPS, PR_CAPBSET_DROP, CAP_CHOWN = 8, 24, 0
SHELL = "while read line; do echo $line $(id -un) $(id -gn) $HOME; done"
by_su = child("su", "www-data", "-s", "/bin/sh", "-c", SHELL)
NUMBERS = "import os, sys\nwhile line := sys.stdin.readline():\n    print(*os.getresuid(), *os.getresgid(), *os.getgroups(), flush=True)"


def become():
    os.setgroups([7, 8, 9])
    os.setresgid(101, 102, 101)
    os.setresuid(1001, 1001, 1001)


by_number = child("python3", "-c", NUMBERS, preexec_fn=become)


def lose():
    call("prctl", PR_CAPBSET_DROP, CAP_CHOWN, 0, 0, 0)
    call("prctl", PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setresuid(33, 33, 33)


with_capabilities = child("cat", preexec_fn=lose)
os.makedirs("/tmp/of-nobody", exist_ok=True)
os.chown("/tmp/of-nobody", 65534, 65534)


def capabilities(pid):
    with open(f"/proc/{pid}/status") as f:
        return {line.split(":")[0]: line.split()[1] for line in f if line.startswith("Cap")}


# after the exec: those of a fresh program of that user, and the smaller bounding set
talk(with_capabilities, b"ready")
expected = capabilities(with_capabilities.pid)


def su(counter):
    said = talk(by_su, b"%d" % counter)
    return said == b"%d www-data www-data /var/www" % counter or said


def numbers(counter):
    said = talk(by_number, b"?")
    return said == b"1001 1001 1001 101 102 102 7 8 9" or said


def new_one(counter):
    if counter % 10:
        return True
    text = os.popen("su nobody -s /bin/sh -c 'id -u'").read()
    return (text == "65534\n" and os.stat("/tmp/of-nobody").st_uid == 65534) or text


keep(
    all_of(
        su=su,
        numbers=numbers,
        capabilities=lambda n: capabilities(with_capabilities.pid) == expected and not int(expected["CapBnd"], 16) & 1,
        new=new_one,
    )
)
