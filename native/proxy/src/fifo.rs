//! The channel from a device to its proxy: a bounded lock-free FIFO of commands with many pushers
//! and one popper (uccl-ep §3.1, Figure 6).
//!
//! **Publishing a slot.** Each 64-bit word of a slot has one lap bit: 1 in the first lap around the
//! FIFO, 0 in the second, and so on. The popper takes a slot when *both* words show the current
//! lap. So the words may become visible in any order: two 8-byte stores of a CPU do as well as one
//! 16-byte store of a GPU, even where the bus splits that. One bit is enough, because a slot is
//! written again only after its command was completed. There is no shared \"published\" index, so a
//! slow pusher does not delay others.
//!
//! **Order.** A pusher's release store of each word follows its earlier writes (the token itself).
//! The popper's acquire load of both words precedes its reads. On a GPU: a system-scope release, or
//! a fence and plain stores.
//!
//! **Flow control.** A pusher takes an index while fewer than `capacity` (`kMaxInflight`) commands
//! are not completed. It reads the popper's index only when the pushers' shared copy shows a full
//! FIFO.
//!
//! [`raw`](crate::raw) places each polled word near the side that polls it.

use std::sync::Arc;

use crate::{
    command::{Command, CommandError, Words, LAP},
    parker::Parker,
    raw::Area,
    sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release},
};

/// Maximum number of commands that a FIFO holds.
pub const MAX_CAPACITY: u32 = 1 << 20;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FifoError {
    #[error("a FIFO capacity of {0} is invalid; expected a power of two, at most 1048576")]
    Capacity(u32),
    #[error(transparent)]
    Command(#[from] CommandError),
    #[error("the FIFO is full: {0} commands are not completed; wait for one, or give the proxy more capacity")]
    Full(u64),
    #[error("the proxy is closed; its remaining commands will never complete; open another one")]
    Closed,
}

/// The device's end. Any number of threads may use it.
#[derive(Clone, Debug)]
pub struct Pusher {
    area: Arc<Area>,
    /// The parker of the popper.
    parker: Arc<Parker>,
}

/// The proxy's end.
#[derive(Debug)]
pub struct Popper {
    area: Arc<Area>,
    /// Number of completed commands; only this end writes it.
    completed: u64,
}

/// A FIFO in memory of this process.
///
/// # Errors
/// [`FifoError::Capacity`].
pub fn fifo(capacity: u32, parker: Arc<Parker>) -> Result<(Pusher, Popper), FifoError> {
    check(capacity)?;
    fifo_in(Area::allocate(capacity), parker)
}

/// A FIFO in caller-provided memory, such as pinned host memory that a GPU pushes to.
///
/// # Errors
/// [`FifoError::Capacity`].
pub fn fifo_in(area: Area, parker: Arc<Parker>) -> Result<(Pusher, Popper), FifoError> {
    check(area.parts().capacity)?;
    let area = Arc::new(area);
    Ok((Pusher { area: Arc::clone(&area), parker }, Popper { area, completed: 0 }))
}

fn check(capacity: u32) -> Result<(), FifoError> {
    match capacity.is_power_of_two() && capacity <= MAX_CAPACITY {
        true => Ok(()),
        false => Err(FifoError::Capacity(capacity)),
    }
}

/// The lap bit of the command with this index.
#[inline]
fn lap(index: u64, capacity: u64) -> u64 {
    match index & capacity {
        0 => LAP,
        _ => 0,
    }
}

impl Pusher {
    /// Pushes a command if there is room; returns its index for [`Pusher::is_complete`].
    ///
    /// # Errors
    /// [`FifoError::Full`], [`FifoError::Command`], [`FifoError::Closed`].
    #[inline]
    pub fn try_push(&self, command: &Command) -> Result<u64, FifoError> {
        self.try_push_words(command.encode()?)
    }

    /// Pushes a command and waits for room: so the proxy paces its device.
    ///
    /// # Errors
    /// [`FifoError::Command`], [`FifoError::Closed`].
    pub fn push(&self, command: &Command) -> Result<u64, FifoError> {
        let words = command.encode()?;
        loop {
            match self.try_push_words(words) {
                Err(FifoError::Full(_)) if !self.parker.is_closed() => pause(),
                Err(FifoError::Full(_)) => return Err(FifoError::Closed),
                other => return other,
            }
        }
    }

    /// As [`Pusher::try_push`], with an encoded command. The highest bit of each word is ignored.
    #[inline]
    pub fn try_push_words(&self, words: Words) -> Result<u64, FifoError> {
        let index = self.claim()?;
        let lap = lap(index, self.area.capacity());
        let slot = self.area.slot(index);
        slot[0].store(words[0] & !LAP | lap, Release);
        slot[1].store(words[1] & !LAP | lap, Release);
        match self.parker.wake() {
            true => Ok(index),
            false => Err(FifoError::Closed),
        }
    }

    #[inline]
    fn claim(&self) -> Result<u64, FifoError> {
        let side = self.area.pushers();
        let mut index = side.claimed.load(Relaxed);
        loop {
            if index.wrapping_sub(side.completed_seen.load(Acquire)) as i64
                >= self.area.capacity() as i64
            {
                let completed = self.area.completed().load(Acquire);
                side.completed_seen.fetch_max(completed, AcqRel);
                if index.wrapping_sub(completed) as i64 >= self.area.capacity() as i64 {
                    return Err(FifoError::Full(self.area.capacity()));
                }
            }
            match side.claimed.compare_exchange_weak(index, index + 1, Relaxed, Relaxed) {
                Ok(_) => return Ok(index),
                Err(now) => index = now,
            }
        }
    }

    /// Whether the command with this index is completed: a write or an atomic when it is posted, a
    /// drain or a barrier when it has ended.
    #[inline]
    pub fn is_complete(&self, index: u64) -> bool {
        self.area.completed().load(Acquire) > index
    }

    /// Waits until [`Pusher::is_complete`].
    ///
    /// # Errors
    /// [`FifoError::Closed`].
    pub fn wait(&self, index: u64) -> Result<(), FifoError> {
        loop {
            // Read before the check, so that the last completion is seen.
            let closed = self.parker.is_closed();
            if self.is_complete(index) {
                return Ok(());
            }
            if closed {
                return Err(FifoError::Closed);
            }
            pause();
        }
    }
}

impl Popper {
    /// Peeks at the command `ahead` places behind the oldest one that isn't completed.
    #[inline]
    pub fn poll(&self, ahead: u64) -> Option<Words> {
        // Slots from here on belong to the lap before.
        if ahead >= self.area.capacity() {
            return None;
        }
        let index = self.completed + ahead;
        let lap = lap(index, self.area.capacity());
        let slot = self.area.slot(index);
        let words = [slot[0].load(Acquire), slot[1].load(Acquire)];
        (words[0] & LAP == lap && words[1] & LAP == lap).then(|| [words[0] & !LAP, words[1] & !LAP])
    }

    /// Completes the `n` oldest commands that [`Popper::poll`] returned: their slots may be reused.
    #[inline]
    pub fn pop(&mut self, n: u64) {
        self.completed += n;
        self.area.completed().store(self.completed, Release);
    }

    /// The index of the oldest command that isn't completed.
    pub fn index(&self) -> u64 {
        self.completed
    }
}

#[cfg(not(loom))]
fn pause() {
    std::thread::yield_now();
}

#[cfg(loom)]
fn pause() {
    loom::thread::yield_now();
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::thread;

    use super::*;

    fn drain(n: u32) -> Command {
        Command::Drain { up_to: Some(n) }
    }

    #[test]
    fn a_full_fifo_takes_nothing_until_a_command_is_completed() {
        let (pusher, mut popper) = fifo(4, Arc::default()).unwrap();
        let mut first = 0;
        for round in 0..10 {
            let held = u64::from(round != 0);
            for i in held..4 {
                assert_eq!(pusher.try_push(&drain(i as u32)), Ok(first + i));
            }
            assert_eq!(pusher.try_push(&drain(9)), Err(FifoError::Full(4)));
            for i in held..4 {
                let words = popper.poll(i).unwrap();
                assert_eq!(Command::decode(words), Ok(drain(i as u32)));
            }
            assert_eq!(popper.poll(4), None);
            assert!(!pusher.is_complete(first), "polled isn't completed");
            popper.pop(3);
            first += 3;
            assert!(pusher.is_complete(first - 1) && !pusher.is_complete(first));
        }
        for bad in [0, 3, MAX_CAPACITY * 2] {
            assert_eq!(fifo(bad, Arc::default()).unwrap_err(), FifoError::Capacity(bad));
        }
    }

    /// A word of the next lap is not taken while the other word shows the old lap: a torn store.
    #[test]
    fn a_half_written_command_is_not_taken() {
        for first in [0, 1] {
            let (pusher, mut popper) = fifo(2, Arc::default()).unwrap();
            for index in 0..6u64 {
                let words = drain(index as u32).encode().unwrap();
                let lap = lap(index, 2);
                pusher.area.pushers().claimed.fetch_add(1, Relaxed);
                let slot = pusher.area.slot(index);
                slot[first].store(words[first] | lap, Release);
                assert_eq!(popper.poll(0), None);
                slot[1 - first].store(words[1 - first] | lap, Release);
                assert_eq!(popper.poll(0), Some(words));
                popper.pop(1);
            }
        }
    }

    #[test]
    fn commands_of_many_pushers_come_once_and_in_each_ones_order() {
        const EACH: u32 = 20_000;
        let (pusher, mut popper) = fifo(64, Arc::default()).unwrap();
        let threads: Vec<_> = (0..4u32)
            .map(|t| {
                let pusher = pusher.clone();
                thread::spawn(move || {
                    (0..EACH).for_each(|i| assert!(pusher.push(&drain(t * EACH + i)).is_ok()))
                })
            })
            .collect();
        let mut next = [0; 4];
        for _ in 0..4 * EACH {
            let words = loop {
                match popper.poll(0) {
                    Some(words) => break words,
                    None => thread::yield_now(),
                }
            };
            let Ok(Command::Drain { up_to: Some(n) }) = Command::decode(words) else {
                panic!("{words:?} was never pushed")
            };
            let t = (n / EACH) as usize;
            assert_eq!(n % EACH, next[t]);
            next[t] += 1;
            popper.pop(1);
        }
        assert_eq!((next, popper.poll(0)), ([EACH; 4], None));
        threads.into_iter().for_each(|t| t.join().unwrap());
    }
}

#[cfg(all(test, loom))]
mod loom_handshakes;

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::thread;

    use super::*;

    /// Every command arrives once, whole, in its pusher's order, within the capacity, and after
    /// earlier writes.
    #[test]
    fn two_pushers_and_a_popper_over_two_laps() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(2);
        model.max_branches = 20_000;
        model.check(|| {
            let (pusher, mut popper) = fifo(2, Arc::new(Parker::default())).unwrap();
            let tokens: Arc<[_; 2]> = Arc::new([0, 0].map(loom::sync::atomic::AtomicU64::new));
            let threads: Vec<_> = (0..2u64)
                .map(|t| {
                    let (pusher, tokens) = (pusher.clone(), Arc::clone(&tokens));
                    thread::spawn(move || {
                        for i in 0..2 - t {
                            // Both words encode the thread and the command.
                            let id = t * 2 + i + 1;
                            tokens[t as usize].store(id, Relaxed);
                            while pusher.try_push_words([id, id]).is_err() {
                                thread::yield_now();
                            }
                        }
                    })
                })
                .collect();
            let mut next = [1, 3];
            for _ in 0..3 {
                let words = loop {
                    match popper.poll(0) {
                        Some(words) => break words,
                        None => thread::yield_now(),
                    }
                };
                assert_eq!(words[0], words[1], "half of another command");
                let t = (words[0] as usize - 1) / 2;
                assert_eq!(words[0], next[t]);
                assert!(tokens[t].load(Relaxed) >= words[0], "before its token");
                next[t] += 1;
                popper.pop(1);
            }
            threads.into_iter().for_each(|t| t.join().unwrap());
            assert_eq!((next, popper.poll(0)), ([3, 4], None));
        });
    }

    #[test]
    fn completion_is_never_early_and_publishes_earlier_writes() {
        loom::model(|| {
            let (pusher, mut popper) = fifo(1, Arc::new(Parker::default())).unwrap();
            let done = Arc::new(loom::sync::atomic::AtomicU32::new(0));
            let index = pusher.try_push_words([1, 1]).unwrap();
            let descriptor = Arc::clone(&done);
            let proxy = thread::spawn(move || {
                assert_eq!(popper.poll(0), Some([1, 1]));
                descriptor.store(1, Relaxed);
                popper.pop(1);
            });
            if pusher.is_complete(index) {
                assert_eq!(done.load(Relaxed), 1);
            }
            proxy.join().unwrap();
            assert!(pusher.is_complete(index));
        });
    }

    #[test]
    fn a_sleeping_proxy_is_woken_by_a_push() {
        loom::model(|| {
            let parker = Arc::new(Parker::default());
            let (pusher, popper) = fifo(1, Arc::clone(&parker)).unwrap();
            let device = thread::spawn(move || pusher.try_push_words([1, 1]).unwrap());
            parker.park(std::time::Duration::MAX, || popper.poll(0).is_some());
            assert_eq!(popper.poll(0), Some([1, 1]), "woken by nothing");
            device.join().unwrap();
        });
    }
}
