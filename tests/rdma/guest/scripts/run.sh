# `run`, a part of stage2.sh: the output goes through pipes, for a program may open /dev/stderr again,
# which a port does not allow.
$bb mkfifo $rg/out $rg/err
$bb cat <$rg/out >$port_out & c1=$!
$bb cat <$rg/err >$port_err & c2=$!
# Without "setsid" the command would share the session of process 1.
( exec 9>&-; ulimit -l unlimited; ulimit -n 65536; ulimit -c 0
  exec $bb setsid /bin/sh $rg/ctl/command ) </dev/null >$rg/out 2>$rg/err &
wait $!
status=$?
# What the command has left running keeps the pipes open: wait for it a little.
( exec 9>&-; $bb sleep 2; $bb kill $c1 $c2 2>/dev/null ) &
killer=$!
wait $c1 $c2
$bb kill $killer 2>/dev/null
finish $status
