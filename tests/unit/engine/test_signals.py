"""Opening an engine leaves the process's signal handlers as they were, whatever a library does."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# As libpsm2 does: some handlers when it is loaded, others when it is first asked.
LIBRARY = """
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

static void ends(int signal) { (void)signal; _exit(77); }

static void take(const int *signals, int n) {
    for (int i = 0; i < n; i++) {
        struct sigaction action = {.sa_handler = ends};
        sigaction(signals[i], &action, 0);
    }
}

__attribute__((constructor)) static void loaded(void) {
    const int signals[] = {SIGINT, SIGTERM, SIGSEGV, SIGBUS, SIGILL, SIGABRT};
    take(signals, 6);
}

uint32_t fi_version(void) { return 1 << 16 | 17; }
int fi_getinfo(uint32_t v, const char *n, const char *s, uint64_t f, void *h, void **i) {
    (void)v; (void)n; (void)s; (void)f; (void)h; (void)i;
    const int signals[] = {SIGINT, SIGHUP, SIGUSR1, SIGPIPE, SIGCHLD};
    take(signals, 5);
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, 0);
    return -61;
}
void fi_freeinfo(void *i) { (void)i; }
void *fi_dupinfo(const void *i) {
    (void)i;
    void **info = calloc(1, 4096);
    /* tx_attr, rx_attr, ep_attr, domain_attr, fabric_attr */
    for (int at = 9; at < 14; at++) info[at] = calloc(1, 4096);
    return info;
}
int fi_fabric(void *a, void **f, void *c) { (void)a; (void)f; (void)c; return -38; }
const char *fi_strerror(int e) { (void)e; return "no data"; }
"""

PROGRAM = """
import atexit, faulthandler, os, signal, sys, threading, time
from fabric_ray import TransferEngine
from fabric_ray import errors
from fabric_ray._native import survey

def handlers():
    with open("/proc/self/status") as status:
        masks = [line.split() for line in status if line.startswith(("SigBlk", "SigIgn", "SigCgt"))]
        # The C library takes 32 and 33 for itself when the first thread begins.
        return {name: int(mask, 16) & ~(3 << 31) for name, mask in masks}

class Stop(BaseException):
    pass

def stop(signum, frame):
    raise Stop

signal.signal(signal.SIGTERM, stop)
faulthandler.enable()
before = handlers()
survey([])
assert handlers() == before, (before, handlers())
engine = TransferEngine()
assert "libfabric-that-takes-signals" in open("/proc/self/maps").read()
try:
    TransferEngine(transport="libfabric")
except errors.TransportUnavailable:
    pass
assert handlers() == before, (before, handlers())
assert signal.getsignal(signal.SIGTERM) is stop

atexit.register(print, "at exit", flush=True)
raised = []
for number, kind in ((signal.SIGTERM, Stop), (signal.SIGINT, KeyboardInterrupt)):
    try:
        try:
            threading.Timer(0.1, os.kill, (os.getpid(), number)).start()
            engine.counter().wait(1, timeout=20)
        finally:
            print("finally", flush=True)
    except kind as error:
        print(kind.__name__, flush=True)
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler: a library that takes the signals can't be made")
    folder = tmp_path_factory.mktemp("library")
    (source, made) = (folder / "library.c", folder / "libfabric-that-takes-signals.so")
    source.write_text(LIBRARY)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", made, source], check=True)
    return made


def test_a_library_that_takes_the_signals_doesnt_keep_them(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C and SIGTERM reach Python, and its `finally` and `atexit`, as before."""
    monkeypatch.setenv("FABRIC_RAY_LIBFABRIC", str(library))
    command = [sys.executable, "-c", PROGRAM]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    said = ["finally", "Stop", "finally", "KeyboardInterrupt", "at exit"]
    assert (ran.stdout.split("\n")[:-1], ran.returncode) == (said, 0), ran.stderr


def test_a_signal_whose_handler_was_taken_ends_the_process_as_it_did(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a handler of Python's, SIGTERM kills: no library turns it into an exit."""
    monkeypatch.setenv("FABRIC_RAY_LIBFABRIC", str(library))
    program = (
        "import os, signal\n"
        "from fabric_ray import TransferEngine\n"
        "engine = TransferEngine()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], timeout=120)
    assert ran.returncode == -15
