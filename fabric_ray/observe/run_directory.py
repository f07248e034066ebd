"""The directory with the sockets of one user's processes."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from fabric_ray.errors import InvalidArgument

RUN_DIR_VARIABLE = "FABRIC_RAY_RUN_DIR"
# Most bytes of a path in sockaddr_un, without its terminator.
_LONGEST = 107


def run_dir() -> Path:
    """``$FABRIC_RAY_RUN_DIR``, else ``$XDG_RUNTIME_DIR/fabric-ray``, else a directory of
    this user in ``/tmp``. It may not exist yet."""
    named = os.environ.get(RUN_DIR_VARIABLE)
    if named:
        return Path(named)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "fabric-ray"
    return Path("/tmp") / f"fabric-ray-{os.geteuid()}"


def run_dirs() -> list[Path]:
    """The directories where this user's processes may have their sockets, :func:`run_dir` first.
    Not every process of a user is started with ``$XDG_RUNTIME_DIR``: services, ``sudo``, ``docker
    exec`` and batch systems leave it out."""
    if os.environ.get(RUN_DIR_VARIABLE):
        return [run_dir()]
    user = os.geteuid()
    others = Path(f"/run/user/{user}/fabric-ray"), Path("/tmp") / f"fabric-ray-{user}"
    return list(dict.fromkeys((run_dir(), *others)))


def make_run_dir(directory: Path) -> None:
    """Creates the directory for this user alone, and checks it.

    Raises:
        InvalidArgument: another user owns it, it is a link, or others may write to it.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument(
            f"the run directory {directory} can't be made: {error.strerror}; name another in "
            f"{RUN_DIR_VARIABLE}"
        ) from None
    check_run_dir(directory)


def check_run_dir(directory: Path) -> None:
    """Checks that only this user can write to it. A user who can create sockets there could pose
    as a process of this user.

    Raises:
        InvalidArgument: it doesn't exist, another user owns it, it is a link, or others may write
            to it.
    """
    try:
        found = directory.lstat()
    except OSError as error:
        raise InvalidArgument(
            f"the run directory {directory} can't be read: {error.strerror}; name another in "
            f"{RUN_DIR_VARIABLE}"
        ) from None
    others_write = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or others_write:
        raise InvalidArgument(
            f"the run directory {directory} must belong to this user, and only this user may write "
            f"to it; remove it, or name another in {RUN_DIR_VARIABLE}"
        )


def unready_path(path: Path) -> Path:
    """The path of a socket until its process listens, so that no client takes it for the socket of
    a dead process."""
    return path.with_suffix(".new")


def _pid_namespace() -> str:
    try:
        link = os.readlink("/proc/self/ns/pid")
    except OSError:
        return "0"
    return link.removeprefix("pid:[").removesuffix("]")


def socket_path(directory: Path, pid: int) -> Path:
    """The path of a process's socket. Containers may share the directory, and process ids repeat
    between their PID namespaces.

    Raises:
        InvalidArgument: the path is too long for a socket.
    """
    path = directory / f"{pid}-{_pid_namespace()}.sock"
    if len(os.fsencode(path)) > _LONGEST:
        raise InvalidArgument(
            f"{path} is too long for a socket; name a shorter directory in {RUN_DIR_VARIABLE}"
        )
    return path
