//! File work by threads that block in system calls, without io_uring.

use super::{
    queue::Inbox,
    raw,
    work::{FileWork, Progress},
};
use crate::error::DomainError;

/// Threads of one engine. Disks like several requests at a time; more cost memory and little else.
pub(super) const THREADS: usize = 4;

/// The loop of one thread. It ends when the inbox is closed.
pub(super) fn serve(inbox: &Inbox) {
    while let Some(work) = inbox.take() {
        if work.begin() {
            work.finish(carry_out(&work));
            inbox.waker.wake();
        }
    }
}

fn carry_out(work: &FileWork) -> Result<(), DomainError> {
    for piece in 0.. {
        let Some(mut rest) = work.range(piece) else { break };
        loop {
            // SAFETY: the caller that queued the work keeps its memory until it is over.
            let n = unsafe { raw::move_some(work, rest) };
            match work.after(rest, n) {
                Progress::All => break,
                Progress::Some(left) => rest = left,
                Progress::Failed(e) => return Err(e),
            }
        }
    }
    Ok(())
}
