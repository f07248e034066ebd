"""`python -m tests.rdma.guest`: run, shell, fetch."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import fields
from types import FrameType

from tests.rdma.guest.cache import KERNELS
from tests.rdma.guest.machine import EXIT_GUEST_FAILED, Guest, fetch
from tests.rdma.guest.options import Options
from tests.rdma.guest.report import GuestError, say

_SHELL = ("/bin/sh", "-c", "exec ${SHELL:-/bin/sh} -i || exec /bin/sh -i")


def main(argv: Sequence[str]) -> int:
    action, options = _parse(argv)
    if action == "fetch":
        fetch(options.package, kernel=options.kernel, refresh=True)
        return 0
    # SIGTERM and SIGHUP end the guest as Ctrl-C does.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    guest = Guest(options, interactive=action == "shell")
    try:
        status = guest.run()
        if options.verbose:
            guest.report_console()
        if options.stats:
            times = " ".join(f"{name}={seconds:.2f}" for name, seconds in guest.times.items())
            say(f"{times} accel={guest.accel}")
        return status
    finally:
        guest.close()


def _leave(number: int, frame: FrameType | None) -> None:
    del frame
    sys.exit(128 + number)


def _parse(argv: Sequence[str]) -> tuple[str, Options]:
    parser = argparse.ArgumentParser(
        prog="python -m tests.rdma.guest",
        description="Runs a command on this machine's files, in a QEMU guest with RDMA devices.",
    )
    actions = parser.add_subparsers(dest="action", required=True)
    common = _common()
    run = actions.add_parser("run", parents=[common], help="run a command")
    run.add_argument(
        "--timeout",
        type=float,
        default=300,
        metavar="SECONDS",
        help="for all of it, start included; 0: none (300)",
    )
    run.add_argument("command", nargs="+", metavar="COMMAND")
    shell = actions.add_parser("shell", parents=[common], help="an interactive shell")
    shell.set_defaults(timeout=0.0, command=_SHELL)
    actions.add_parser("fetch", parents=[common], help="fill the cache, or bring it up to date")
    given = vars(parser.parse_args(argv))
    if not (0 <= given["hosts"] <= 250 and 0 <= given["rails"] <= 250):
        parser.error("--hosts and --rails: 0 to 250")
    known = {field.name for field in fields(Options)} & set(given)
    values = {name: given[name] for name in known}
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return given["action"], Options(**values)


def _common() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    default = Options()
    add = parser.add_argument
    add(
        "--hosts",
        type=int,
        default=default.hosts,
        metavar="N",
        help="emulated hosts, each with one device on every rail (2)",
    )
    add(
        "--rails",
        type=int,
        default=default.rails,
        metavar="N",
        help="separate networks, that is devices of each host (1)",
    )
    add(
        "--netns",
        action="store_true",
        help="a network namespace host0, host1... for each host, joined by 10.78.0.0/24, for "
        "`ip netns exec`",
    )
    add(
        "--mtu",
        type=int,
        default=default.mtu,
        help="of the interfaces; 9000 makes an RDMA MTU of 4096, 1500 of 1024",
    )
    add(
        "--rw",
        action="append",
        default=[],
        metavar="DIR",
        help="let the guest write to this folder (may be repeated)",
    )
    add(
        "--package",
        action="append",
        default=[],
        metavar="NAME",
        help="a Debian package to have in the guest, such as perftest, even if it is not installed "
        "here (may be repeated)",
    )
    add("--setup", metavar="SCRIPT", help="a shell script for the guest to run before the command")
    add("--cwd", metavar="DIR", help="where the command runs (here)")
    add("--cpus", type=int, default=default.cpus, help="of the guest")
    add(
        "--memory",
        default=default.memory,
        metavar="SIZE",
        help="of the guest, as QEMU takes it (1024M)",
    )
    add(
        "--accel",
        choices=["auto", "kvm", "tcg"],
        default=os.environ.get("RDMA_GUEST_ACCEL", "auto"),
        help="kvm, tcg (emulation), or auto: KVM where it works",
    )
    add(
        "--kernel",
        metavar="PACKAGE",
        default=os.environ.get("RDMA_GUEST_KERNEL"),
        help=f"Debian package of the guest's kernel ({' or '.join(KERNELS)})",
    )
    add(
        "--boot-timeout",
        type=float,
        metavar="SECONDS",
        help="for the guest's own start (20 with KVM, 120 without)",
    )
    add("--verbose", action="store_true", help="QEMU's command, kernel messages")
    add("--keep", action="store_true", help="leave the temporary folder")
    add("--append", default="", help="more for the kernel's command line")
    add(
        "--qemu-arg",
        action="append",
        default=[],
        metavar="ARG",
        help="one more argument for QEMU (may be repeated)",
    )
    add("--stats", action="store_true", help="tell how long each part has taken")
    return parser


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except GuestError as error:
        say(str(error))
        sys.exit(EXIT_GUEST_FAILED)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:
        sys.exit(128 + signal.SIGPIPE)
