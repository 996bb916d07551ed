"""Comparing two states."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from crab.replay.state import FileState, Observation, ProcessState, compare, shell_state

FILE = FileState(type="file", mode="0644", owner="0:0", size=3, content="abc")
SERVER = ProcessState(argv=("python3", "server.py"), cwd="/root", uid=0, state="alive", descriptors={"0": "/dev/null"})
STATE = Observation(
    files={"/root": FileState(type="folder", mode="0755", owner="0:0"), "/root/a": FILE},
    processes=(SERVER,),
    ports=("tcp 127.0.0.1:80",),
    shell={"cwd": "/root", "variable X": 'declare -x X="1"'},
    outputs={"cat a": "exit 0\none\ntwo\n"},
)


def changed(**fields: object) -> Observation:
    return msgspec.structs.replace(STATE, **fields)


def differences(**fields: object) -> list[str]:
    return compare(STATE, changed(**fields))


def test_equal_states_differ_in_nothing() -> None:
    assert compare(STATE, changed()) == []


def test_files_that_differ_are_named_with_what_differs() -> None:
    root = STATE.files["/root"]
    assert differences(files={"/root": root}) == ["file /root/a is missing"]
    assert differences(files=STATE.files | {"/root/b": FILE}) == ["file /root/b is there, but should not"]
    other = msgspec.structs.replace(FILE, content="xyz", mode="0600")
    assert differences(files={"/root": root, "/root/a": other}) == [
        "file /root/a: mode '0600', should be '0644', other content"
    ]


def test_a_missing_folder_is_told_once_not_for_each_file_in_it() -> None:
    assert differences(files={}) == ["folder /root is missing"]
    more = STATE.files | {"/new": STATE.files["/root"], "/new/x": FILE, "/new/y": FILE}
    assert differences(files=more) == ["folder /new is there, but should not"]


def test_an_empty_look_is_not_equal_to_a_full_one() -> None:
    full = changed(files={"/": STATE.files["/root"]} | STATE.files)
    assert compare(full, changed(files={})) == ["folder / is missing"]
    assert compare(changed(files={}), full) == ["folder / is there, but should not"]


def test_processes_are_compared_by_what_they_are_not_by_their_numbers() -> None:
    where = "process python3 server.py (in /root, uid 0)"
    assert differences(processes=()) == [f"{where} is missing"]
    assert differences(processes=(SERVER,) * 3) == [f"{where} runs 2 times, but should not"]
    stopped = msgspec.structs.replace(SERVER, state="stopped")
    assert differences(processes=(stopped,)) == [f"{where} is stopped, should be alive"]
    other = msgspec.structs.replace(SERVER, descriptors={"0": "/dev/null", "3": "/root/a at 5, flags 2"})
    assert differences(processes=(other,)) == [f"{where}, descriptor 3 is there, but should not: /root/a at 5, flags 2"]


def test_ports_shell_and_outputs_are_compared() -> None:
    assert differences(ports=()) == ["nothing listens on tcp 127.0.0.1:80"]
    assert differences(ports=(*STATE.ports, "tcp 127.0.0.1:81")) == [
        "something listens on tcp 127.0.0.1:81, but should not"
    ]
    assert differences(shell={}) == ["the persistent shell is gone"]
    assert differences(shell=STATE.shell | {"cwd": "/"}) == ["shell, cwd: is '/', should be '/root'"]
    assert differences(outputs={"cat a": "exit 0\none\n2\n"}) == ["observed cat a: line 3 is '2', should be 'two'"]
    assert differences(outputs={"cat a": "exit 0\none\n"}) == ["observed cat a: line 3 'two' is missing"]
    assert differences(outputs={"cat a": "exit 0\none\r\ntwo\n"}) == ["observed cat a: other line ends"]


def test_looking_at_fewer_files_is_a_difference() -> None:
    assert differences(left_out=("/tmp/**",)) == ["looked at other files: /tmp/** left out"]


text = st.text("abc/ \n=", max_size=8)
files = st.builds(FileState, type=text, mode=text, size=st.integers(-1, 3), content=text, links=st.integers(1, 2))
processes = st.builds(
    ProcessState,
    argv=st.tuples(text),
    cwd=text,
    uid=st.integers(0, 1),
    state=st.sampled_from(["alive", "stopped"]),
    descriptors=st.dictionaries(text, text, max_size=2),
)
states = st.builds(
    Observation,
    files=st.dictionaries(text, files, max_size=3),
    processes=st.lists(processes, max_size=3).map(tuple),
    ports=st.lists(text, max_size=2).map(lambda ports: tuple(sorted(ports))),
    shell=st.dictionaries(text, text, max_size=2),
    outputs=st.dictionaries(text, text, max_size=2),
)


@given(states)
def test_a_state_equals_itself_whatever_the_order_of_its_processes(state: Observation) -> None:
    assert compare(state, msgspec.structs.replace(state, processes=state.processes[::-1])) == []


@given(states, states)
def test_states_that_are_not_equal_always_differ_in_something_and_both_ways(
    one: Observation, other: Observation
) -> None:
    def order(state: Observation) -> Observation:
        return msgspec.structs.replace(state, processes=tuple(sorted(state.processes, key=msgspec.json.encode)))

    assert bool(compare(one, other)) == bool(compare(other, one)) == (order(one) != order(other))


def test_the_state_of_a_shell_is_taken_apart_and_what_is_volatile_left_out() -> None:
    answers = {
        "cwd": "/root/shop\n",
        "mask": "0022\n",
        "variables": 'declare -x A="1"\ndeclare -- B="two\nlines"\ndeclare -ir PPID="77"\ndeclare -A C=([x]="1" )\n',
        "functions": "f () \n{ \n    if true; then\n        echo }\n    fi\n}\ng () \n{ \n    :\n}\n",
        "aliases": "alias ll='ls -l'\n",
        "options": "set +o allexport\nshopt -s nullglob\n",
        "traps": "trap -- 'echo bye' EXIT\n",
        "jobs": "[1]-    12 Running                 sleep 9 &\n[2]+ 345678 Stopped                 vi\n     345679                       | cat &\n",
    }
    assert shell_state(answers) == {
        "cwd": "/root/shop",
        "umask": "0022",
        "variable A": 'declare -x A="1"',
        "variable B": 'declare -- B="two\nlines"',
        "variable C": 'declare -A C=([x]="1" )',
        "function f": "f () \n{ \n    if true; then\n        echo }\n    fi\n}",
        "function g": "g () \n{ \n    :\n}",
        "alias ll": "alias ll='ls -l'",
        "option allexport": "set +o",
        "option nullglob": "shopt -s",
        "trap EXIT": "trap -- 'echo bye' EXIT",
        "job 1": "[1]- Running                 sleep 9 &",
        "job 2": "[2]+ Stopped                 vi",
        "job 3": "| cat &",
    }
