#!/bin/sh
# boot.sh DEB [COMMAND] - boot the kernel of a Debian package in a virtual machine and try the inspector's programs on it
# (trial.py), or do something else there, in the folder of the repository.
#
# The machine sees this one's files read-only, with a layer in its memory above, so it needs no image. Its console goes to
# the output; the last lines are what was found. Nothing is left behind. Needs qemu-system-x86, busybox-static, cpio, kmod.
#
#   apt-get download linux-image-6.1.0-50-amd64 && nice bench/vm/boot.sh linux-image-6.1.0-50-amd64_*.deb
#
# ACCEL=kvm is faster where there is one, MEMORY=… sets the size (MiB). DISK=file is a btrfs that is mounted at PLACE; what is
# written to it is thrown away.
set -eu

repository=$(cd "$(dirname "$0")/../.." && pwd)
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT

package=$1
shift
command=${*:-.venv/bin/python -m bench.vm.trial}
dpkg-deb -x "$package" "$made/kernel"
release=$(basename "$made"/kernel/boot/vmlinuz-* | cut -d- -f2-)
modules=$made/kernel/lib/modules
[ -d "$modules" ] || modules=$made/kernel/usr/lib/modules
depmod -b "${modules%/lib/modules}" "$release"

root=$made/root
mkdir -p "$root/bin" "$root/modules"
cp /bin/busybox "$root/bin"
# in the order in which they have to be loaded; what is built in has no file
for name in virtio_pci 9p 9pnet_virtio overlay loop virtio_blk unix_diag tcp_diag udp_diag netlink_diag raw_diag af_packet_diag tun nf_tables nft_ct crc32c_generic xxhash_generic blake2b_generic sha256_generic btrfs ext4 xfs; do
    modprobe -d "${modules%/lib/modules}" -S "$release" --show-depends "$name" 2>/dev/null || true
done | sed -n 's/^insmod \([^ ]*\).*/\1/p' | awk '!known[$0]++' | {
    number=100
    while read -r file; do
        number=$((number + 1))
        case $file in *.xz) xz -dc "$file" ;; *) cat "$file" ;; esac >"$root/modules/$number.ko"
    done
}
cat >"$root/init" <<INIT
#!/bin/busybox sh
busybox mkdir -p /proc /dev /host /memory /whole
for module in /modules/*.ko; do busybox insmod \$module; done
busybox mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=262144,cache=loose root /host
busybox mount -t tmpfs memory /memory
busybox mkdir /memory/u /memory/k
busybox mount -t overlay -o lowerdir=/host,upperdir=/memory/u,workdir=/memory/k whole /whole
for kind in proc sysfs devtmpfs; do
    case \$kind in proc) place=proc ;; sysfs) place=sys ;; *) place=dev ;; esac
    busybox mount -t \$kind none /whole/\$place
done
for place in run tmp var/tmp dev/shm; do busybox mkdir -p /whole/\$place; busybox mount -t tmpfs none /whole/\$place; done
busybox mount -t cgroup2 none /whole/sys/fs/cgroup
busybox mkdir -p /whole/dev/pts
busybox mount -t devpts none /whole/dev/pts
busybox mount -t bpf none /whole/sys/fs/bpf
${DISK:+busybox mount -t btrfs /whole/dev/vda /whole$PLACE}
exec busybox switch_root /whole /bin/sh -c "cd $repository
export PATH=/usr/sbin:/usr/bin:/sbin:/bin PYTHONDONTWRITEBYTECODE=1
$command
busybox poweroff -f"
INIT
chmod +x "$root/init"
(cd "$root" && find . | cpio -o -H newc --quiet) >"$made/initramfs"

qemu-system-x86_64 -accel "${ACCEL:-tcg}" -cpu max -smp 2 -m "${MEMORY:-2048}" -nographic -no-reboot -nic none \
    -kernel "$made"/kernel/boot/vmlinuz-* -initrd "$made/initramfs" -append "console=ttyS0 quiet panic=-1" \
    ${DISK:+-drive "file=$DISK,format=raw,if=virtio,snapshot=on"} \
    -virtfs local,path=/,mount_tag=root,security_model=none,readonly=on,multidevs=remap </dev/null
