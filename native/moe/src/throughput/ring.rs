//! The two ends of a ring. The tail is a word at the receiver, the number of filled slots. The head
//! is a word at the sender, the number of read slots. Both only grow, by ordered atomics behind the
//! bytes they count.
//!
//! A slot is written again when the receiver has returned it *and* the previous write has ended at
//! the sender. So no late copy of that write lands on its successor, and its source is not read any
//! more (MR-1).

use std::{collections::VecDeque, sync::atomic::Ordering::Acquire};

use fabric_proxy::{
    command::{Add, Command, MAX_LEN},
    raw::AtomicWords,
};

use super::{commands::Commands, machine::Traffic};

/// The layout of a ring: its slots, and the words of its two ends.
#[derive(Clone, Copy, Debug)]
pub struct RingLayout {
    pub partner: u32,
    /// Whether the ring carries answers or sums.
    pub is_back: bool,
    /// Offset of the ring in the receiver's part.
    pub base: u64,
    pub slots: u64,
    pub stride: u64,
    /// The local word that the partner moves.
    pub word: u64,
    /// The partner's word that this end moves.
    pub partners_word: u64,
    /// The command channels of its slots and of its credits.
    pub data: u8,
    pub credits: u8,
}

impl RingLayout {
    /// The offset of slot `i`, counted from the first slot ever used.
    pub fn slot(&self, i: u64) -> u64 {
        self.base + i % self.slots * self.stride
    }

    fn read(&self, words: &AtomicWords) -> u64 {
        words[self.word as usize].load(Acquire)
    }
}

/// The sender's end.
#[derive(Debug)]
pub struct Outbound {
    pub layout: RingLayout,
    pub sent: u64,
    /// The number of preambles among the sent slots.
    pub preambles: u64,
    /// Slots before this may be written again.
    cleared: u64,
    /// Sent batches: the end slot, and the last command.
    batches: VecDeque<(u64, u64)>,
    /// Returned batches: the end slot, and the drain after which it is free.
    draining: VecDeque<(u64, u64)>,
}

impl Outbound {
    pub fn new(layout: RingLayout) -> Self {
        let (batches, draining) = (VecDeque::new(), VecDeque::new());
        Self { layout, sent: 0, preambles: 0, cleared: 0, batches, draining }
    }

    /// The number of sent tokens, answers or sums.
    pub fn rows(&self) -> u64 {
        self.sent - self.preambles
    }

    /// Adds the sent rows by destination; `near` tells which ranks are on this rank's node.
    pub fn count(&self, near: &impl Fn(u32) -> bool, all: &mut Traffic) {
        let rows = match (near(self.layout.partner), self.layout.is_back) {
            (false, false) => &mut all.rail_tokens,
            (true, false) => &mut all.node_tokens,
            (true, true) => &mut all.node_answers,
            (false, true) => &mut all.rail_sums,
        };
        *rows += self.rows();
    }

    /// Slots that may be written.
    pub fn room(&self) -> u64 {
        self.layout.slots - (self.sent - self.cleared)
    }

    /// Whether slots up to one may be written again.
    pub fn is_cleared(&self, up_to: u64) -> bool {
        self.cleared >= up_to
    }

    /// Takes the slots that the receiver has returned; whether there were any.
    ///
    /// # Errors
    /// The receiver returned more slots than were sent.
    pub fn update(&mut self, words: &AtomicWords, commands: &mut Commands) -> Result<bool, String> {
        let head = self.layout.read(words);
        if head > self.sent {
            return Err(format!("it gave back {head} slots of a ring, and was sent {}", self.sent));
        }
        let mut back = None;
        while let Some(batch) = self.batches.front().filter(|(end, _)| *end <= head) {
            back = Some(*batch);
            self.batches.pop_front();
        }
        if let Some((end, command)) = back {
            self.draining.push_back((end, commands.drain_up_to(command)));
        }
        let before = self.cleared;
        while let Some((end, _)) =
            self.draining.front().filter(|(_, drain)| commands.is_complete(*drain))
        {
            self.cleared = *end;
            self.draining.pop_front();
        }
        Ok(back.is_some() || before != self.cleared)
    }

    /// Sends slots that lie at `from`, and moves the tail.
    pub fn send(&mut self, from: &[u64], commands: &mut Commands) {
        let (layout, first) = (self.layout, self.sent);
        let at = |i: usize| (from[i], layout.slot(first + i as u64));
        let most = (MAX_LEN / layout.stride) as usize;
        let mut begin = 0;
        while begin < from.len() {
            // What lies together on both sides is one write.
            let (src, dst) = at(begin);
            let mut n = 1;
            while n < most && begin + n < from.len() {
                let ahead = n as u64 * layout.stride;
                if at(begin + n) != (src + ahead, dst + ahead) {
                    break;
                }
                n += 1;
            }
            let slot = layout.partners_word as u16;
            let last = begin + n == from.len();
            commands.push(Command::Write {
                rank: layout.partner as u16,
                channel: layout.data,
                from: src,
                to: dst,
                len: n as u64 * layout.stride,
                add: last.then_some(Add { slot, value: from.len() as i64, ordered: true }),
            });
            begin += n;
        }
        self.sent += from.len() as u64;
        if let Some(last) = commands.last() {
            self.batches.push_back((self.sent, last));
        }
    }
}

/// The receiver's end.
#[derive(Debug)]
pub struct Inbound {
    pub layout: RingLayout,
    /// Slots that were read.
    pub taken: u64,
    /// Slots that were given back.
    credited: u64,
    /// Whether what comes is of this era; before that come slots of earlier ones.
    pub fresh: bool,
}

impl Inbound {
    pub fn new(layout: RingLayout) -> Self {
        Self { layout, taken: 0, credited: 0, fresh: false }
    }

    /// Slots that have come and weren't read.
    ///
    /// # Errors
    /// The sender wrote more than the ring holds.
    pub fn ready(&self, words: &AtomicWords) -> Result<u64, String> {
        let tail = self.layout.read(words);
        match tail.checked_sub(self.taken).filter(|_| tail - self.credited <= self.layout.slots) {
            Some(ready) => Ok(ready),
            None => Err(format!(
                "it filled {tail} slots of a ring of {}, of which {} were given back",
                self.layout.slots, self.credited
            )),
        }
    }

    /// Offset of the slot `ahead` slots after the next one.
    pub fn next(&self, ahead: u64) -> u64 {
        self.layout.slot(self.taken + ahead)
    }

    /// Gives back the slots before `up_to`, a chunk at a time, or all if they are the last of an
    /// exchange.
    pub fn credit(&mut self, up_to: u64, chunk: u32, last: bool, commands: &mut Commands) {
        // What earlier eras left may have been passed over, and given back, since `up_to` was
        // noted.
        let Some(slots) = up_to.checked_sub(self.credited) else { return };
        if slots >= u64::from(chunk) || last && slots > 0 {
            let layout = &self.layout;
            commands.add(layout.partner, layout.credits, layout.partners_word, slots);
            self.credited = up_to;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use fabric_proxy::{fifo::fifo, Parker};

    use super::*;

    #[test]
    fn slots_that_were_passed_over_are_not_given_back_again() {
        let (pusher, _popper) = fifo(8, Arc::new(Parker::default())).unwrap();
        let mut commands = Commands::new(pusher);
        let layout = RingLayout {
            partner: 1,
            is_back: false,
            base: 0,
            slots: 8,
            stride: 64,
            word: 0,
            partners_word: 1,
            data: 0,
            credits: 1,
        };
        let mut ring = Inbound::new(layout);
        ring.credit(6, 4, false, &mut commands);
        assert_eq!((ring.credited, commands.last()), (6, Some(0)));
        ring.credit(2, 4, true, &mut commands);
        assert_eq!((ring.credited, commands.last()), (6, Some(0)));
    }
}
