"""Names of what is in CRIU's image files, and which of it is no state.

One table for each kind of message of CRIU's `images/*.proto`: the names of its fields in the order of their numbers.
`name:table` is a message of its own; `-` is a number that is left out because it says nothing of the state: identities that
CRIU or the kernel deals out, and what belongs to a file rather than to its user. A field that no table names is kept under
its number: what is not understood counts as state.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from crab.checkpoint.imagefiles import messages, parse

Record = dict[str, Any]
"""Fields by name: integers, bytes, records, or a tuple of these where there are several."""

_TABLES = {
    # of a task
    "core": "- x86:thread_info task:task ids:ids thread:thread arm arm64 - ppc s390 mips loongarch riscv",
    # 4: PF_… of the kernel, which no restore brings back; 9, 12: numbers of a group and of a filter, as of each thread
    "task": "state exit_code personality - blocked comm timers:timers rlimits:rlimits - pending:signals seccomp_mode "
    "- loginuid oom_score_adj actions:action - - child_subreaper - blocked_extended stop_signal membarrier",
    "thread": "robust_list robust_list_length nice policy priority blocked altstack:altstack death_signal pending:signals "
    "credentials:credentials seccomp_mode seccomp_filter comm blocked_extended rseq:rseq cg_set",
    "ids": "vm files fs sighand pid_ns net_ns ipc_ns uts_ns mnt_ns user_ns cgroup_ns time_ns",
    "altstack": "pointer size flags",
    "rseq": "pointer size signature section",
    "action": "handler flags restorer mask compat mask_extended",
    "signals": "signal:signal",
    "signal": "info",
    "timers": "real:itimer virtual:itimer profiling:itimer posix:posix_timer",
    "itimer": "interval_s interval_us left_s left_us",
    "posix_timer": "id clock signal notify value overrun interval_s interval_ns left_s left_ns thread",
    "rlimits": "rlimit:rlimit",
    "rlimit": "current maximum",
    "credentials": "uid gid euid egid suid sgid fsuid fsgid inheritable permitted effective bounding secure_bits groups "
    "lsm_profile lsm_sockcreate apparmor no_new_privs ambient",
    "thread_info": "clear_tid registers:registers floating:floating tls:tls",
    "registers": "r15 r14 r13 r12 bp bx r11 r10 r9 r8 ax cx dx si di orig_ax ip cs flags sp ss fs_base gs_base ds es fs gs "
    "mode",
    "floating": "control status tags opcode instruction operand mxcsr mxcsr_mask st xmm - - extended:extended",
    # 1: which parts the processor takes for used; the others have their initial values here, so it says nothing of its own
    "extended": "- ymm bounds bound_config mask zmm_upper zmm_high keys shadow:shadow",
    "shadow": "mode pointer",
    "tls": "number base limit seg32 contents_high contents_low read_only pages not_present usable",
    "mm": "start_code end_code start_data end_data start_stack start_brk brk arg_start arg_end env_start env_end exe auxv "
    "vmas:vma dumpable aio:aio thp_disabled",
    "aio": "id requests length",
    "vma": "start end offset backing prot flags status - advice fdflags",
    "pstree": "pid parent group session threads",
    "fs": "cwd root umask",
    # of a descriptor and what it leads to
    "fdinfo": "id flags type fd -",
    "file": "type id reg:reg inet:inet ns:ns packet:packet netlink:netlink eventfd:eventfd epoll:epoll signalfd:signalfd tun "
    "timerfd:timerfd inotify:inotify fanotify ext:ext unix:unix fifo:fifo pipe:pipe tty:tty memfd:memfd bpf pidfd:pidfd",
    "owner": "uid euid signal pid_type pid",
    # 7 to 13: mount, and size, mode and checksum, which are the file's own
    "reg": "- flags position - owner:owner name - - ext - - - -",
    "pipe": "- pipe flags owner:owner",
    "fifo": "- pipe file",
    "eventfd": "- flags owner:owner counter",
    "epoll": "- flags owner:owner targets:epoll_target",
    "epoll_target": "- fd events data - - -",
    "signalfd": "- flags owner:owner mask",
    "timerfd": "- flags owner:owner clock ticks settime left_s left_ns interval_s interval_ns",
    "inotify": "- flags - owner:owner watches:watch",
    "watch": "- inode mask ignored device number handle",
    "memfd": "- flags position owner:owner inode",
    "memfd_inode": "name uid gid size pages seals inode huge mode",
    "pidfd": "- - flags pid owner:owner",
    "ns": "- - kind flags",
    "ext": "- - - - owner:owner",
    "tty": "- tty flags owner:owner - file",
    # 8 and 13: numbers of the device node and of its file system
    "tty_info": "id type locked exclusive packet_mode session group - settings:termios locked_settings:termios size:window "
    "pty:pty - uid gid",
    "termios": "input output control local line input_speed output_speed characters",
    "window": "rows columns width height",
    "pty": "index",
    "tty_data": "tty data",
    "pipe_data": "pipe bytes size",
    "unix": "- inode type state flags uflags backlog peer owner:owner options:options name shutdown permissions:permissions "
    "folder deleted - -",
    "inet": "- inode family type protocol state port peer_port flags backlog address peer_address owner:owner options:options "
    "v6only ip_options interface - shutdown tcp_options",
    "netlink": "- - protocol state - flags port groups peer_port peer_group owner:owner options:options -",
    "packet": "- type protocol flags interface owner:owner options:options version reserve aux_data orig_dev vnet_hdr loss "
    "timestamp copy_threshold multicast fanout rx_ring tx_ring -",
    "permissions": "mode uid gid",
    "options": "send_buffer receive_buffer send_timeout_s send_timeout_us receive_timeout_s receive_timeout_us reuseaddr "
    "priority receive_low mark passcred passsec dontroute no_check bound_device filter reuseport broadcast keepalive keepcnt "
    "keepidle keepintvl oobinline linger buffer_lock",
    "queued": "socket length - descriptors:rights",
    "rights": "type files",
    # 9: the clock that time stamps of the protocol are taken from
    "tcp": "incoming incoming_sequence outgoing outgoing_sequence options send_scale mss receive_scale - cork nodelay unsent "
    "window_sequence send_window largest_window receive_window window_start",
    "remap": "file target kind",
    # 4, 5: device and inode; 7, 8: times
    "ghost": "uid gid mode - - device - - chunks size target",
    "lock": "kind type pid fd start length",
    # of a namespace
    "sem": "key:ipc count",
    "shm": "key:ipc size - huge",
    "queue": "key:ipc limit count",
    "ipc": "key uid gid creator_uid creator_gid mode id",
    "message": "type size",
    "names": "host domain",
    # 2 to 4: numbers of the mount, of its device and of the mount that it lies on; 10, 11: peer groups
    "mount": "type id - parent flags root place source options - - plugin external kind sharing deleted sb_flags key",
    "filters": "filter:filter",
    "filter": "code before flags",
    "pagemap": "address count in_parent flags count64",
}


def _fields(text: str) -> dict[int, tuple[str, str]]:
    found: dict[int, tuple[str, str]] = {}
    for number, word in enumerate(text.split(), 1):
        name, _, table = word.partition(":")
        found[number] = ("" if name == "-" else name, table)
    return found


_FIELDS = {table: _fields(text) for table, text in _TABLES.items()}


def read(message: bytes, table: str) -> Record:
    """The fields of one message by name, without what is no state."""
    names = _FIELDS[table]
    found: Record = {}
    for number, wire, value in parse(message):
        name, inner = names.get(number, (str(number), ""))
        if not name:
            continue
        known: Any = value
        if inner and isinstance(value, bytes):
            known = read(value, inner)
        elif isinstance(value, int) and wire == 0 and value >= 1 << 63:
            known = value - (1 << 64)  # negative numbers are stored as 64 bits
        if name in found:
            before = found[name]
            found[name] = (*before, known) if isinstance(before, tuple) else (before, known)
        else:
            found[name] = known
    return found


def several(value: Any) -> tuple[Any, ...]:
    """The values of a field that may be there any number of times."""
    return () if value is None else value if isinstance(value, tuple) else (value,)


def read_all(path: Path, table: str) -> Iterator[Record]:
    """The messages of an image file; none if there is no such file."""
    if path.exists():
        for message in messages(path):
            yield read(message, table)
