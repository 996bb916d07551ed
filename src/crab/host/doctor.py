"""What this machine offers to Crab and what it lacks: one row for each thing that can be missing.

Knows what Crab needs of a host and why; the experiments themselves are in `crab.host.kernel_trials`, getting what is missing
is in `crab.host.provision`. Looking leaves nothing behind and never fails: a probe that goes wrong is a row as well.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from crab import native
from crab.errors import CrabError, HostUnsuitable
from crab.host import criu as crius
from crab.host import kernel_trials, mounts, provision
from crab.model import Health, Probe

_FIX = "crab doctor --fix"
_NEEDS_ROOT = "needs root"
_OTHER_KERNEL = "use a distribution's kernel"

# ---------------------------------------------------------------- what probes look at


@dataclass(slots=True)
class Machine:
    """What the probes share: where Crab's folders are, and trials whose result more than one row shows."""

    state_dir: Path
    private_dir: Path
    is_root: bool
    files: kernel_trials.FileTrials = field(default_factory=kernel_trials.FileTrials)
    namespaces: str = _NEEDS_ROOT
    """Empty: the namespaces of a sandbox can be made; else why not."""


def _inspect(state_dir: Path, private_dir: Path) -> Machine:
    machine = Machine(state_dir, private_dir, os.geteuid() == 0)
    if not machine.is_root:
        return machine
    try:
        with kernel_trials.shifted_user_namespace() as user_namespace:
            machine.namespaces = ""
            machine.files = kernel_trials.file_systems(user_namespace)
            return machine
    except Exception as error:
        machine.namespaces = machine.namespaces and _reason(error)
    with suppress(Exception):  # the rows then say "not tried"
        machine.files = kernel_trials.file_systems(None)
        machine.files.idmapped = "not tried, as there is no user namespace"
    return machine


def _reason(error: BaseException) -> str:
    if isinstance(error, CrabError):
        return error.message
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__


# ---------------------------------------------------------------- the rows


def _ok(found: str) -> Probe:
    return Probe(name="", health="ok", found=found)


def _degraded(found: str, loses: str, remedy: str) -> Probe:
    return Probe(name="", health="degraded", found=found, loses=loses, remedy=remedy)


def _missing(found: str, remedy: str) -> Probe:
    return Probe(name="", health="missing", found=found, remedy=remedy)


def _row(problem: str, found: str, remedy: str) -> Probe:
    """Missing if there is a problem, else ok."""
    return _missing(problem, remedy) if problem else _ok(found)


def kernel_row(release: str, machine: str) -> Probe:
    """Judge a kernel by its release: 5.19 brought overlay on idmapped layers, which every sandbox's root is."""
    found = f"Linux {release} {machine}"
    version = crius.parse_version(release)
    if version < (5, 19):
        return _missing(
            found, "use Linux 5.19 or newer (Debian 12, Ubuntu 24.04): overlay on idmapped layers is needed"
        )
    if machine != "x86_64":
        return _degraded(found, "Crab is tested on x86_64 only", "use an x86_64 machine")
    if version < (6, 1):
        return _degraded(found, "no kernel with long-term support; few have tried it", "use Linux 6.1 or newer")
    return _ok(found)


def _kernel(_machine: Machine) -> Probe:
    uname = os.uname()
    return kernel_row(uname.release, uname.machine)


def _root(machine: Machine) -> Probe:
    if machine.is_root:
        return _ok("uid 0")
    return _missing(f"uid {os.geteuid()}", "run the daemon (or an embedded crab) as root")


# Numbers of linux/capability.h.
_CAPABILITIES = {
    "CHOWN": 0, "DAC_OVERRIDE": 1, "DAC_READ_SEARCH": 2, "FOWNER": 3, "KILL": 5, "SETGID": 6, "SETUID": 7, "SETPCAP": 8,
    "NET_ADMIN": 12, "NET_RAW": 13, "SYS_CHROOT": 18, "SYS_PTRACE": 19, "SYS_ADMIN": 21, "SYS_RESOURCE": 24, "MKNOD": 27,
    "SETFCAP": 31,
}  # fmt: skip


def capability_row(effective: int) -> Probe:
    """Judge a capability mask (CapEff of /proc/self/status)."""
    lacking = [f"CAP_{name}" for name, bit in _CAPABILITIES.items() if not effective >> bit & 1]
    if not lacking:
        return _ok("all that are needed")
    found = f"without {', '.join(lacking)}"
    if lacking == ["CAP_SYS_RESOURCE"]:
        return _degraded(
            found,
            "resource limits and OOM scores of sandboxes cannot be better than Crab's own; the user namespace of each "
            "sandbox makes up for the rest",
            "give the machine or container CAP_SYS_RESOURCE",
        )
    return _missing(found, "run as root of the machine, or add these capabilities to the container")


def _capabilities(machine: Machine) -> Probe:
    status = _status_of_self()
    if not machine.is_root:
        return _missing(_NEEDS_ROOT, "run as root")
    return capability_row(int(status["CapEff"], 16))


def _status_of_self() -> dict[str, str]:
    lines = Path("/proc/self/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _btf(_machine: Machine) -> Probe:
    if kernel_trials.BTF.exists():
        return _ok(f"{kernel_trials.BTF.stat().st_size >> 10} KiB of type information")
    return _degraded(
        f"no {kernel_trials.BTF}",
        "eBPF programs that look at kernel structures cannot be loaded",
        "use a kernel with CONFIG_DEBUG_INFO_BTF (Debian and Ubuntu have it)",
    )


def ebpf_row(programs: dict[str, str], active_lsms: str) -> Probe:
    """Judge which program types load; the LSM type also needs `bpf` among the active security modules."""
    programs = dict(programs)
    if not programs.get("lsm") and active_lsms and "bpf" not in active_lsms.split(","):
        programs["lsm"] = "bpf is no active security module"
    loads = [name for name, why in programs.items() if not why]
    fails = {name: why for name, why in programs.items() if why}
    found = f"loads {', '.join(loads) or 'nothing'}"
    if fails:
        found += f"; not {', '.join(f'{name} ({why})' for name, why in fails.items())}"
    basic = {"tracepoint", "raw_tracepoint"} & set(fails)
    if basic:
        loses = "changes of files and processes cannot be watched in the kernel: every turn is captured in full"
        return _degraded(found, loses, "allow bpf(2): CONFIG_BPF_SYSCALL, and CAP_BPF or CAP_SYS_ADMIN")
    if {"tp_btf", "iter"} & set(fails):
        return _degraded(found, "processes are looked at through /proc, which is slower", "use a kernel with BTF")
    if fails:
        loses = "kernel functions cannot be hooked; tracepoints do (from Linux 6.13 they show all changes of files)"
        return _degraded(found, loses, "no kernel lockdown, and `bpf` in the kernel's lsm= option, if you can choose")
    return _ok(found)


def _ebpf(machine: Machine) -> Probe:
    if not machine.is_root:
        return _degraded(_NEEDS_ROOT, "not known", "run as root")
    lsms = ""
    with suppress(OSError):  # securityfs may not be mounted
        lsms = Path("/sys/kernel/security/lsm").read_text().strip()
    return ebpf_row(kernel_trials.bpf_programs(), lsms)


def inspector_row(tiers: dict[str, str]) -> Probe:
    """Judge which set of programs loads that tells what a turn changed; `tiers` says of each why not, best first."""
    why_not = "; ".join(f"tier {tier}: {why}" for tier, why in tiers.items() if why)
    for tier, why in tiers.items():
        if not why:
            found = f"tier {tier}" + (f" ({why_not})" if why_not else "")
            if tier == "C":
                loses = "which file was written is not seen, so more is captured; every system call of the machine costs more"
                return _degraded(found, loses, "Linux 6.13 or newer, or one that permits fentry; see docs/inspector.md")
            return _ok(found)
    return _degraded(
        why_not or "no programs",
        "what a turn changes cannot be seen: every checkpoint is a full one",
        "Linux 5.17 or newer with BTF; see docs/inspector.md",
    )


def _inspector(machine: Machine) -> Probe:
    if not machine.is_root:
        return _degraded(_NEEDS_ROOT, "not known", "run as root")
    return inspector_row(kernel_trials.inspector_tiers())


def _criu(machine: Machine) -> Probe:
    try:
        criu = crius.find_criu(machine.private_dir)
    except HostUnsuitable as error:
        return _missing(error.message, error.remedy)
    found = f"{criu.version} ({criu.source}, {criu.program})"
    if not machine.is_root:
        return _degraded(found, f"`criu check` {_NEEDS_ROOT}", "run as root")
    if complaint := crius.check(criu):
        return _missing(f"{found}: {complaint}", f"{_OTHER_KERNEL} (CONFIG_CHECKPOINT_RESTORE), as root of the machine")
    if closed := unsearchable(criu.program):
        return _missing(
            f"{found}, but {closed} is closed to other users, as whom CRIU runs in the user namespace of a sandbox",
            f"chmod o+x {closed}",
        )
    return _ok(found)


def unsearchable(path: Path) -> Path | None:
    """The outermost folder on the way to a program that other users may not enter, or the program if they may not run it."""
    for folder in reversed(path.resolve().parents):
        if not folder.stat().st_mode & 0o001:
            return folder
    return None if path.stat().st_mode & 0o005 == 0o005 else path


def _btrfs(machine: Machine) -> Probe:
    if not provision.has_program("mkfs.btrfs"):
        return _missing("no mkfs.btrfs", _FIX)
    if not machine.is_root:
        known = any(line.split()[-1:] == ["btrfs"] for line in Path("/proc/filesystems").read_text().splitlines())
        return _degraded(
            f"mkfs.btrfs; {'known to' if known else 'not loaded in'} the kernel", _NEEDS_ROOT, "run as root"
        )
    remedy = "modprobe btrfs; on Ubuntu cloud images: apt-get install linux-modules-extra-$(uname -r)"
    return _row(machine.files.btrfs, "made, mounted and removed one", remedy)


def _loop(machine: Machine) -> Probe:
    if not machine.is_root:
        return _degraded(_NEEDS_ROOT, "not known", "run as root")
    problem = machine.files.loop
    if problem and _file_system_of(machine.state_dir) == "btrfs":
        return _degraded(f"none: {problem}", "disk limits need a loop file", "modprobe loop")
    remedy = (
        "modprobe loop, or give the container /dev/loop-control and /dev/loop*; or put the state directory on btrfs"
    )
    return _row(problem and f"none: {problem}", "one could be used", remedy)


def _existing(folder: Path) -> Path:
    """The folder, or the one in which it would be made."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


def _file_system_of(folder: Path) -> str:
    device = os.stat(_existing(folder)).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    by_device = next((entry.fs_type for entry in mounts.mounts() if entry.device == wanted), "")
    if by_device:
        return by_device
    # Files on btrfs have anonymous devices, which mountinfo does not show.
    path = str(_existing(folder).resolve())
    above = [entry for entry in mounts.mounts() if (path + "/").startswith(entry.target.rstrip("/") + "/")]
    return max(above, key=lambda entry: len(entry.target)).fs_type if above else ""


def _overlay(machine: Machine) -> Probe:
    if not machine.is_root:
        return _degraded(_NEEDS_ROOT, "not known", "run as root")
    remedy = f"modprobe overlay, or {_OTHER_KERNEL} with {kernel_trials.OVERLAY_OPTIONS}"
    return _row(machine.files.overlay, f"{kernel_trials.OVERLAY_OPTIONS} on {machine.files.on}", remedy)


def _idmapped(machine: Machine) -> Probe:
    if not machine.is_root:
        return _degraded(_NEEDS_ROOT, "not known", "run as root")
    remedy = "use Linux 5.19 or newer, with btrfs"
    return _row(machine.files.idmapped, f"{machine.files.on} idmapped, and an overlay on it", remedy)


def _namespaces(machine: Machine) -> Probe:
    if not machine.is_root:
        return _degraded(_NEEDS_ROOT, "not known", "run as root")
    remedy = (
        "raise /proc/sys/user/max_user_namespaces; leave the chroot; in a container, allow unshare(2) and CAP_SYS_ADMIN"
    )
    found = f"user (uid 0 as {kernel_trials.SHIFT}), pid, net, ipc, uts, cgroup, mount"
    return _row(machine.namespaces, found, remedy)


def _cgroups() -> tuple[Path | None, dict[str, str]]:
    """Where cgroup2 is mounted, and the version in which each of our controllers is there."""
    unified: Path | None = None
    controllers: dict[str, str] = {}
    for entry in mounts.mounts():
        if entry.fs_type == "cgroup2" and unified is None:
            unified = Path(entry.target)
            controllers |= dict.fromkeys((unified / "cgroup.controllers").read_text().split(), "v2")
        elif entry.fs_type == "cgroup":
            controllers |= dict.fromkeys(entry.super_options, "v1")
    return unified, {name: controllers[name] for name in ("memory", "cpu", "pids") if name in controllers}


def _cgroup2(machine: Machine) -> Probe:
    unified, _ = _cgroups()
    mount = "mount -t cgroup2 none /sys/fs/cgroup/unified (or boot with systemd.unified_cgroup_hierarchy=1)"
    if unified is None:
        return _missing("not mounted", mount)
    if not machine.is_root:
        return _degraded(str(unified), _NEEDS_ROOT, "run as root")
    files = kernel_trials.cgroup_files(unified)
    if "cgroup.freeze" not in files:
        return _missing(f"{unified} without cgroup.freeze", "use Linux 5.19 or newer")
    return _ok(f"{unified}, with cgroup.freeze{' and cgroup.kill' if 'cgroup.kill' in files else ''}")


def _limits(_machine: Machine) -> Probe:
    _, controllers = _cgroups()
    lacking = [name for name in ("memory", "cpu", "pids") if name not in controllers]
    found = ", ".join(f"{name} ({version})" for name, version in controllers.items()) or "none"
    if not lacking:
        return _ok(found)
    loses = f"no limits of {', '.join(lacking)}: a sandbox can take all that the machine has"
    return _degraded(found, loses, "mount the controllers, or delegate them to Crab's cgroup")


def _userfaultfd(machine: Machine) -> Probe:
    if not machine.is_root:
        return _degraded(_NEEDS_ROOT, "not known", "run as root")
    problem = kernel_trials.userfaultfd()
    if problem:
        return _degraded(
            f"none: {problem}", "memory cannot be restored lazily", _OTHER_KERNEL + " (CONFIG_USERFAULTFD)"
        )
    return _ok("usable")


def _seccomp(_machine: Machine) -> Probe:
    problem = ""
    if "Seccomp" not in _status_of_self():
        problem = "the kernel has no seccomp"
    else:
        actions = Path("/proc/sys/kernel/seccomp/actions_avail").read_text().split()
        if "errno" not in actions:
            problem = f"no action `errno`, only {', '.join(actions)}"
    return _row(problem, "filters with errno", f"{_OTHER_KERNEL} (CONFIG_SECCOMP_FILTER)")


def _image_tools(_machine: Machine) -> Probe:
    tools = [tool for tool in ("mmdebstrap", "debootstrap", "skopeo", "umoci") if provision.has_program(tool)]
    found = ", ".join(tools) or "none"
    lost: list[str] = []
    if not {"mmdebstrap", "debootstrap"} & set(tools):
        lost.append("no images of kind `debian:`")
    if not {"skopeo", "umoci"} <= set(tools):
        lost.append("no images from registries")
    return _degraded(found, " and ".join(lost), _FIX) if lost else _ok(found)


def _network_tools(_machine: Machine) -> Probe:
    if not provision.has_program("ip"):
        return _missing("no ip", _FIX)
    if not provision.has_program("nft"):
        return _degraded("ip, no nft", "no sandboxes with network `nat`", _FIX)
    return _ok("ip, nft")


def _native(_machine: Machine) -> Probe:
    if native.is_built():
        return _ok(f"built: {', '.join(native.PROGRAMS)}")
    if provision.has_program("gcc", "cc", "clang") and provision.has_static_libc():
        return _missing("not built", "python -m crab.native")
    return _missing("not built, and no C compiler with a static libc", f"{_FIX}, then python -m crab.native")


def space_row(free: int, inodes: int, folder: Path) -> Probe:
    """Judge bytes and inodes that are free. A Debian image takes 0.2 GB, each GB of a sandbox's memory 1 GB a checkpoint."""
    found = f"{free / 1e9:.1f} GB free in {folder}"
    remedy = f"free some space, or use a state directory on another file system than {folder}'s"
    if free < 1e9 or 0 < inodes < 10_000:
        return _missing(found if free < 1e9 else f"{inodes} inodes free in {folder}", remedy)
    if free < 10e9:
        return _degraded(found, "checkpoints will soon be refused for want of space", remedy)
    return _ok(found)


def _space(machine: Machine) -> Probe:
    folder = _existing(machine.state_dir)
    status = os.statvfs(folder)
    # Some file systems (btrfs) count no inodes: f_files is 0 there.
    return space_row(status.f_bavail * status.f_frsize, status.f_favail if status.f_files else 0, folder)


_RELEASED = 1_735_689_600.0
"""2025-01-01: no machine that runs Crab can be earlier."""


def clock_row(now: float, drift: float, time_namespace: str) -> Probe:
    """Judge the wall clock, how far it went apart from the monotonic one in some 10 ms, and time namespaces."""
    if now < _RELEASED:
        when = time.strftime("%Y-%m-%d", time.gmtime(now))
        return _missing(
            f"the clock says {when}", "set the clock (timedatectl set-ntp true): downloads and turns are dated"
        )
    if abs(drift) > 0.005:
        return _degraded(
            f"the wall clock jumps ({drift * 1000:+.0f} ms in 10 ms)",
            "times of turns may be out of order",
            "check the NTP",
        )
    if time_namespace:
        return _degraded(
            f"no time namespaces: {time_namespace}",
            "monotonic clocks of restored programs may jump after a reboot",
            f"{_OTHER_KERNEL} (CONFIG_TIME_NS)",
        )
    return _ok("monotonic and wall clock agree; time namespaces")


def _clock(machine: Machine) -> Probe:
    wall, monotonic = time.time(), time.monotonic()
    time.sleep(0.01)
    drift = (time.time() - wall) - (time.monotonic() - monotonic)
    problem = kernel_trials.time_namespace() if machine.is_root else ""
    if not problem and not Path("/proc/self/ns/time").exists():
        problem = "the kernel knows none"
    return clock_row(time.time(), drift, problem)


def _children(_machine: Machine) -> Probe:
    there = Path(f"/proc/self/task/{os.getpid()}/children").exists()
    return _row(
        "" if there else "no /proc/PID/task/TID/children", "listed by /proc", f"{_OTHER_KERNEL} (CONFIG_PROC_CHILDREN)"
    )


_PROBES: dict[str, Callable[[Machine], Probe]] = {
    "kernel": _kernel,
    "root": _root,
    "capabilities": _capabilities,
    "namespaces": _namespaces,
    "criu": _criu,
    "children of processes": _children,
    "btrfs": _btrfs,
    "loop devices": _loop,
    "overlay": _overlay,
    "idmapped mounts": _idmapped,
    "free space": _space,
    "cgroup v2": _cgroup2,
    "limits": _limits,
    "seccomp": _seccomp,
    "native programs": _native,
    "image tools": _image_tools,
    "network tools": _network_tools,
    "clock": _clock,
    "userfaultfd": _userfaultfd,
    "type information": _btf,
    "ebpf": _ebpf,
    "inspector": _inspector,
}


def examine(state_dir: Path, private_dir: Path) -> list[Probe]:
    """Look at everything that Crab needs: one row each, always in the same order (about 0.3 s).

    `state_dir` need not exist. Never raises, changes nothing, leaves nothing behind. Rows that cannot be looked at without
    root say so.
    """
    machine = _inspect(state_dir, private_dir)
    rows: list[Probe] = []
    for name, probe in _PROBES.items():
        try:
            row = probe(machine)
        except Exception as error:
            row = _missing(f"cannot be looked at: {_reason(error)}", "run `crab doctor` as root; else please report it")
        rows.append(msgspec.structs.replace(row, name=name))
    return rows


def worst(rows: Sequence[Probe]) -> Health:
    """`missing` if any row is, else `degraded` if any is, else `ok`."""
    for health in ("missing", "degraded"):
        if any(row.health == health for row in rows):
            return health
    return "ok"


_PACKAGED = {"btrfs", "image tools", "network tools", "native programs"}
_MODULES = {"btrfs": "btrfs", "loop devices": "loop", "overlay": "overlay"}


def fix(
    rows: Sequence[Probe], private_dir: Path, progress: Callable[[str], None] = lambda _line: None
) -> tuple[str, ...]:
    """Do what can be done about rows that are not ok: packages, kernel modules, the C programs, the private CRIU.

    Returns what was done, one phrase each; `examine` again to see what it was good for. Does one thing after the other, and
    the others too if one fails.

    Raises:
        HostUnsuitable: something that could have been done failed; the message has all of them.
    """
    bad = {row.name for row in rows if row.health != "ok"}
    steps: list[Callable[[], str]] = []
    if bad & _PACKAGED:
        steps.append(lambda: ", ".join(f"installed {name}" for name in provision.install_packages(progress)))
    steps += [_loader(module) for name, module in _MODULES.items() if name in bad]
    if "native programs" in bad:
        steps.append(_build)
    if "criu" in bad:
        steps.append(lambda: f"CRIU {provision.ensure_criu(private_dir, progress).version}")
    done: list[str] = []
    failures: list[CrabError] = []
    for step in steps:
        try:
            if phrase := step():
                done.append(phrase)
        except CrabError as error:
            failures.append(error)
    if failures:
        first = failures[0]
        message = "\n".join(error.message for error in failures)
        raise HostUnsuitable(message, remedy=first.remedy, done=done)
    return tuple(done)


def _loader(module: str) -> Callable[[], str]:
    def load() -> str:
        modprobe = shutil.which("modprobe", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
        if modprobe is None or os.geteuid() != 0:
            return ""
        loaded = subprocess.run([modprobe, "-q", module], capture_output=True, timeout=60).returncode == 0
        return f"loaded kernel module {module}" if loaded else ""

    return load


def _build() -> str:
    native.build()
    return "compiled the native programs"
