"""What an agent does all day: edit files, commit, look at the history, in a repository that is checked for damage."""

import os
import random
import shutil
import subprocess

from heartbeat import keep, scratch

scratch()
shutil.rmtree("project", ignore_errors=True)
env = os.environ | {
    f"GIT_{who}_{what}": "agent@example.org" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
}


def git(*words):
    return subprocess.run(["git", "-C", "project", *words], check=True, capture_output=True, text=True, env=env).stdout


os.mkdir("project")
git("init", "-q", "-b", "main")
git("config", "gc.auto", "0")
commits = 0


def check(counter):
    global commits
    for number in random.sample(range(20), 3):
        with open(f"project/file{number}", "a") as f:
            f.write(f"{counter}\n")
    git("add", "-A")
    git("commit", "-qm", f"change {counter}")
    commits += 1
    if counter % 20 == 0:
        git("fsck", "--full")
    found = int(git("rev-list", "--count", "HEAD"))
    if found != commits:
        return f"{found} commits instead of {commits}"
    return git("status", "--porcelain") == ""


keep(check, period=0.1)
