# In the final root: devices, network, then the command. It is process 1, so it must not end.
# @NAME@ are filled in for each run.
cd /
rg=/run/rdma-guest
# Programs of busybox, by $bb: they start faster than those behind 9p.
bb=$rg/bin/busybox
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
# The streams to the host, found by name; 9 is for what rdma-guest itself says.
for p in /sys/class/virtio-ports/*; do
    [ -e $p/name ] && read -r n <$p/name || continue
    case $n in rg.*) eval "port_${n#rg.}=/dev/${p##*/}" ;; esac
done
exec 9>$port_ctl
echo "at root" >&9
fail() { echo "fail $*" >&9; $bb sleep 1; $bb poweroff -f; }

$bb mkdir -p /dev/pts /dev/shm /run/lock
$bb mount -t devpts -o mode=620,ptmxmode=666 devpts /dev/pts
$bb mount -t tmpfs -o mode=1777 shm /dev/shm
$bb ln -sf /proc/self/fd /dev/fd
$bb ln -sf fd/0 /dev/stdin
$bb ln -sf fd/1 /dev/stdout
$bb ln -sf fd/2 /dev/stderr
# Modules are loaded on demand by busybox: kmod needs binary indices, which busybox's depmod does not write.
$bb ln -s busybox $rg/bin/modprobe
echo $rg/bin/modprobe >/proc/sys/kernel/modprobe
$bb hostname rdma-guest

# Folders of the host that the guest may write to, at their own paths.
@SHARES@

# --- network and RDMA devices
@NETWORK@
echo "at ready" >&9

finish() {
    cd /
    @UNSHARE@
    echo "at end" >&9
    echo "exit $1" >&9
    exec 9>&-
    $bb poweroff -f
    while :; do $bb sleep 1; done
}

@COMMAND@
