//! Litmus tests of the handshakes between kernels and their host, for loom.
//!
//! Each model has the steps of one handshake, with the orders of the sources that it names. A
//! barrier of a block is the start of a thread: both order all before them. Each test also weakens
//! one order after the other, and the model must fail then. Loom knows no scopes of a GPU:
//! `tests/unit/kernels/test_kernel_compiler.py` checks those in the machine code. Nor does it let a
//! load see a later store.

use std::panic::{catch_unwind, AssertUnwindSafe};

use loom::{
    sync::atomic::{fence, AtomicU64},
    thread,
};

use super::*;
use crate::sync::atomic::Ordering::{self, SeqCst};

/// Whether a model holds in every order of its threads with at most three preemptions.
fn holds(model: impl Fn() + Sync + Send + 'static) -> bool {
    let mut all = loom::model::Builder::new();
    all.preemption_bound = Some(3);
    catch_unwind(AssertUnwindSafe(|| all.check(model))).is_ok()
}

fn word() -> Arc<AtomicU64> {
    Arc::new(AtomicU64::new(0))
}

/// A fence that a weakened model leaves out.
fn fence_if(there: bool) {
    if there {
        fence(SeqCst);
    }
}

/// `Fifo::publish` of `common/fifo.cuh`: a fence, then two stores that the bus may split.
fn publish(area: &Area, index: u64, command: u64, fenced: bool) {
    let lap = lap(index, area.capacity());
    fence_if(fenced);
    for word in area.slot(index) {
        word.store(command & !LAP | lap, Relaxed);
    }
}

/// `Fifo::claim` of `common/fifo.cuh`.
fn claim(area: &Area) -> Option<u64> {
    let (side, capacity) = (area.pushers(), area.capacity());
    let mut index = side.claimed.load(Relaxed);
    loop {
        if index + 1 - side.completed_seen.load(Relaxed) > capacity {
            let now = area.completed().load(Acquire);
            fence(SeqCst);
            side.completed_seen.fetch_max(now, Relaxed);
            if index + 1 - now > capacity {
                return None;
            }
        }
        match side.claimed.compare_exchange(index, index + 1, Relaxed, Relaxed) {
            Ok(_) => return Some(index),
            Err(now) => index = now,
        }
    }
}

/// A table, then its word (`SharedWords::set`); a kernel waits for the word, and other lanes read
/// the table (`fetch_words` of `moe/mailbox.cuh`).
fn host_word(set: Ordering, wait: Ordering) -> bool {
    holds(move || {
        let (table, flag) = (word(), word());
        let device = thread::spawn({
            let (table, flag) = (Arc::clone(&table), Arc::clone(&flag));
            move || {
                if flag.load(wait) == 1 {
                    let lane = thread::spawn(move || assert_eq!(table.load(Relaxed), 1));
                    lane.join().unwrap();
                }
            }
        });
        table.store(1, Relaxed);
        flag.store(1, set);
        device.join().unwrap();
    })
}

#[test]
fn a_table_is_read_after_its_word() {
    assert!(host_word(Release, Acquire));
    assert!(!host_word(Relaxed, Acquire));
    assert!(!host_word(Release, Relaxed));
}

/// The host aborts, and clears tables afterwards (`SharedWords::abort`); a kernel that copies a
/// cleared table finds the abort word behind it (`fetch_words`).
fn abort(host: bool, device: bool) -> bool {
    holds(move || {
        let (table, aborted) = (Arc::new(AtomicU64::new(1)), word());
        let kernel = thread::spawn({
            let (table, aborted) = (Arc::clone(&table), Arc::clone(&aborted));
            move || {
                let copied = table.load(Relaxed);
                fence_if(device);
                assert!(copied == 1 || aborted.load(Acquire) == 1, "a cleared table is used");
            }
        });
        aborted.store(1, Release);
        if host {
            fence(Release);
        }
        table.store(0, Relaxed);
        kernel.join().unwrap();
    })
}

#[test]
fn a_cleared_table_is_seen_with_the_abort_word() {
    assert!(abort(true, true));
    assert!(!abort(false, true));
    assert!(!abort(true, false));
}

/// Lanes write a note, the block meets, and one lane pushes a command (`tell_host` of
/// `moe/mailbox.cuh`), by two kernels over two laps; the proxy reads the note.
fn told(fenced: bool) -> bool {
    holds(move || {
        let (pusher, mut popper) = fifo(1, Arc::new(Parker::default())).unwrap();
        let note = word();
        let kernel = thread::spawn({
            let (area, note) = (Arc::clone(&pusher.area), Arc::clone(&note));
            move || {
                for command in 1..3 {
                    let lane = Arc::clone(&note);
                    thread::spawn(move || lane.store(command, Relaxed)).join().unwrap();
                    let index = loop {
                        match claim(&area) {
                            Some(index) => break index,
                            None => thread::yield_now(),
                        }
                    };
                    publish(&area, index, command, fenced);
                }
            }
        });
        for command in 1..3 {
            let words = loop {
                match popper.poll(0) {
                    Some(words) => break words,
                    None => thread::yield_now(),
                }
            };
            assert_eq!(words, [command; 2]);
            assert!(note.load(Relaxed) >= command, "before its note");
            popper.pop(1);
        }
        kernel.join().unwrap();
    })
}

#[test]
fn a_command_comes_after_the_note_of_all_lanes() {
    assert!(told(true));
    assert!(!told(false));
}

/// `sync_blocks` of `common/blocks.cuh`, for two blocks.
fn meet(word: &AtomicU64, arrive: Ordering, wait: Ordering) {
    let end = word.fetch_add(1, arrive) / 2 * 2 + 2;
    while word.load(wait) < end {
        thread::yield_now();
    }
}

fn meets(arrive: Ordering, wait: Ordering) -> bool {
    holds(move || {
        let (meeting, rows) = (word(), Arc::new([word(), word()]));
        let block = move |own: usize| {
            let (meeting, rows) = (Arc::clone(&meeting), Arc::clone(&rows));
            move || {
                for turn in 1..3 {
                    rows[own].store(turn, Relaxed);
                    meet(&meeting, arrive, wait);
                    assert!(rows[1 - own].load(Relaxed) >= turn, "before the other block's");
                    meet(&meeting, arrive, wait);
                }
            }
        };
        let other = thread::spawn(block(1));
        block(0)();
        other.join().unwrap();
    })
}

#[test]
fn blocks_see_what_others_did_before_they_met() {
    assert!(meets(AcqRel, Acquire));
    assert!(!meets(Relaxed, Acquire));
    assert!(!meets(AcqRel, Relaxed));
}

/// The orders of a direct store's way.
#[derive(Clone, Copy)]
struct Way {
    arrive: Ordering,
    published: bool,
    count: Ordering,
    counted: Ordering,
}

/// A block stores a row to a peer, all meet, another block tells the host (`pack_rows`,
/// `tell_host`); the host counts at the peer (IC-2), whose host sets a word for its kernel. Each
/// stage goes on only if it sees the one before.
fn direct_store(way: Way) -> bool {
    holds(move || {
        let (pusher, popper) = fifo(1, Arc::new(Parker::default())).unwrap();
        let (row, meeting, counter) = (word(), word(), word());
        let stores = thread::spawn({
            let (row, meeting) = (Arc::clone(&row), Arc::clone(&meeting));
            move || {
                row.store(1, Relaxed);
                meeting.fetch_add(1, way.arrive);
            }
        });
        let tells = thread::spawn(move || {
            if meeting.load(Acquire) == 1 {
                publish(&pusher.area, 0, 1, way.published);
            }
        });
        let host = thread::spawn({
            let counter = Arc::clone(&counter);
            move || {
                if popper.poll(0).is_some() {
                    counter.fetch_add(1, way.count);
                }
            }
        });
        // The peer's host and kernel: `host_word` has what is between them.
        if counter.load(way.counted) == 1 {
            assert_eq!(row.load(Relaxed), 1, "counted before it is readable");
        }
        for thread in [stores, tells, host] {
            thread.join().unwrap();
        }
    })
}

#[test]
fn ic_2_a_stored_row_is_readable_when_it_counts() {
    let way = Way { arrive: AcqRel, published: true, count: Release, counted: Acquire };
    assert!(direct_store(way));
    assert!(!direct_store(Way { arrive: Relaxed, ..way }));
    assert!(!direct_store(Way { published: false, ..way }));
    assert!(!direct_store(Way { count: Relaxed, ..way }));
    assert!(!direct_store(Way { counted: Relaxed, ..way }));
}

/// Two jobs in one place, and what comes of each (`work` of `moe/work.cu`, `Device::begin` and
/// `Device::result` of native/moe's `workers/device.rs`).
fn jobs(post: Ordering, taken: Ordering, done: Ordering, seen: Ordering) -> bool {
    holds(move || {
        let (job, posted, found, finished) = (word(), word(), word(), word());
        let worker = thread::spawn({
            let (job, posted) = (Arc::clone(&job), Arc::clone(&posted));
            let (found, finished) = (Arc::clone(&found), Arc::clone(&finished));
            move || {
                for i in 1..3 {
                    while posted.load(taken) < i {
                        thread::yield_now();
                    }
                    assert_eq!(job.load(Relaxed), i, "another job");
                    found.store(i, Relaxed);
                    finished.store(i, done);
                }
            }
        });
        for i in 1..3 {
            job.store(i, Relaxed);
            posted.store(i, post);
            while finished.load(seen) < i {
                thread::yield_now();
            }
            assert_eq!(found.load(Relaxed), i, "another job's result");
        }
        worker.join().unwrap();
    })
}

#[test]
fn a_job_is_whole_when_posted_and_its_result_when_done() {
    assert!(jobs(Release, Acquire, Release, Acquire));
    assert!(!jobs(Relaxed, Acquire, Release, Acquire));
    assert!(!jobs(Release, Relaxed, Release, Acquire));
    assert!(!jobs(Release, Acquire, Relaxed, Acquire));
    assert!(!jobs(Release, Acquire, Release, Relaxed));
}
