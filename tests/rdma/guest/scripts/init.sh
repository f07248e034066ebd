#!/bin/sh
# The first process: loads modules, puts the root file system together, goes there.
export PATH=/bin
fail() { echo "rdma-guest: $1" >/dev/console; poweroff -f; }
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
for m in @MODULES@; do
    case $m in dummy) set numdummies=0 ;; *) set -- ;; esac
    insmod /m/$m.ko $* || echo "rdma-guest: cannot load $m" >/dev/console
done
# Read-only 9p mounts, one for each layer, the lowest last.  noxattr saves two
# requests a look-up, which overlayfs would make.
nine=trans=virtio,version=9p2000.L,msize=512000,ro,cache=loose,noxattr
for word in $(cat /proc/cmdline); do
    case $word in rg.layers=*) layers=${word#*=} ;; esac
done
lower=
for tag in $(echo $layers | /bin/busybox tr , ' '); do
    mkdir /l/$tag
    mount -t 9p -o $nine $tag /l/$tag || fail "cannot mount layer $tag"
    lower=$lower:/l/$tag
done
mkdir /l/rw
mount -t tmpfs -o mode=755,size=90% rw /l/rw
mkdir /l/rw/upper /l/rw/work
mount -t overlay -o lowerdir=${lower#:},upperdir=/l/rw/upper,workdir=/l/rw/work \
    root /new || fail "cannot mount the overlay"
mkdir -p /new/run /new/dev /new/proc /new/sys /new/tmp
mount -t tmpfs -o mode=755 run /new/run
mkdir -p /new/run/rdma-guest/ctl /new/run/rdma-guest/bin
cp /bin/busybox /new/run/rdma-guest/bin/busybox
mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,ro,cache=none ctl \
    /new/run/rdma-guest/ctl || fail "cannot mount ctl"
mount --move /dev /new/dev
mount --move /proc /new/proc
mount --move /sys /new/sys
exec switch_root /new /run/rdma-guest/bin/busybox sh /run/rdma-guest/ctl/stage2
