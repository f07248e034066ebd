"""Where processes of one user that can be looked into have their sockets."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from fabric_ray.errors import InvalidArgument

RUN_DIR_VARIABLE = "FABRIC_RAY_RUN_DIR"
# What fits into sockaddr_un beside its end.
_LONGEST = 107


def run_dir() -> Path:
    """``$FABRIC_RAY_RUN_DIR``, else ``$XDG_RUNTIME_DIR/fabric-ray``, else one in ``/tmp`` that is
    this user's alone. It need not exist."""
    named = os.environ.get(RUN_DIR_VARIABLE)
    if named:
        return Path(named)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "fabric-ray"
    return Path("/tmp") / f"fabric-ray-{os.geteuid()}"


def make_run_dir(directory: Path) -> None:
    """Makes it, for this user alone, or sees that it is so.

    Raises:
        InvalidArgument: it belongs to somebody else, is a link, or others may write to it.
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
    """Sees that it is this user's alone: whoever can put sockets there can pass for a process of
    this user.

    Raises:
        InvalidArgument: it isn't there, belongs to somebody else, is a link, or others may write
            to it.
    """
    try:
        found = directory.lstat()
    except OSError as error:
        raise InvalidArgument(
            f"the run directory {directory} can't be looked at: {error.strerror}; name another in "
            f"{RUN_DIR_VARIABLE}"
        ) from None
    others_write = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or others_write:
        raise InvalidArgument(
            f"the run directory {directory} isn't this user's alone; remove it, or name another "
            f"in {RUN_DIR_VARIABLE}"
        )


def unready_path(path: Path) -> Path:
    """Where a socket is until its process listens, so that nobody takes it for one whose process is
    gone."""
    return path.with_suffix(".new")


def socket_path(directory: Path, pid: int) -> Path:
    """Where a process has its socket.

    Raises:
        InvalidArgument: the directory's name is too long for a socket.
    """
    path = directory / f"{pid}.sock"
    if len(os.fsencode(path)) > _LONGEST:
        raise InvalidArgument(
            f"{path} is too long for a socket; name a shorter directory in {RUN_DIR_VARIABLE}"
        )
    return path
