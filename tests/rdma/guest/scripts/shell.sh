# `shell`, a part of stage2.sh.
exec </dev/hvc0 >/dev/hvc0 2>&1
@STTY@
( exec 9>&-; ulimit -l unlimited; ulimit -n 65536
  exec $bb setsid -c /bin/sh $rg/ctl/command )
finish $?
