//! The requests of a link's data queue pair, and the work requests that they belong to.

use std::collections::VecDeque;

use crate::{
    api::RegionKey,
    domain::{DomainError, Token},
};

/// A work request on the data queue pair: its requests `first` to `last`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub token: Token,
    pub first: u32,
    /// The request whose completion completes the entry.
    pub last: u32,
    /// The bytes that it touches in the peer's region.
    pub region: RegionKey,
    pub from: u64,
    pub to: u64,
}

/// Uncounted writes that are not known to be readable yet. A read of the last byte of the last one
/// shows it: on PCIe a read pushes the writes before it (PCIe 2.4.1, table 2-40, C2a). An
/// acknowledgement alone does not (InfiniBand 9.7.5.1.2).
#[derive(Clone, Copy, Debug)]
pub(super) struct Unflushed {
    /// Number of writes, and their bytes.
    pub writes: usize,
    pub bytes: u64,
    /// Position of the last byte of the last write.
    pub region: RegionKey,
    pub addr: u64,
    pub rkey: u32,
}

pub(super) struct Ledger {
    depth: u32,
    /// Requests posted and retired. Both only grow, and wrap.
    posted: u32,
    retired: u32,
    entries: VecDeque<Entry>,
    /// The last entries, which wait for a flush read.
    pub unflushed: Option<Unflushed>,
    /// Whether the NIC has refused a request. Nothing is posted after it: the completion of a later
    /// request would complete the refused one too, and the peer's receipt counts writes in order.
    refused: bool,
}

impl Ledger {
    pub fn new(depth: u32) -> Self {
        Self {
            depth,
            posted: 0,
            retired: 0,
            entries: VecDeque::with_capacity(depth as usize),
            unflushed: None,
            refused: false,
        }
    }

    /// Requests that the queue pair can hold.
    pub fn depth(&self) -> u32 {
        self.depth
    }

    /// Free requests of the data queue pair; one is kept for a flush read.
    #[inline]
    pub fn room(&self) -> u32 {
        (self.depth - 1).saturating_sub(self.posted.wrapping_sub(self.retired))
    }

    /// The number of the next request.
    #[inline]
    pub fn next(&self) -> u32 {
        self.posted
    }

    /// Whether the NIC has refused a request.
    #[inline]
    pub fn is_refused(&self) -> bool {
        self.refused
    }

    /// Posts the next request by `post`, or adds it to a chain; returns its number.
    #[inline]
    pub fn push(
        &mut self,
        post: impl FnOnce(u32) -> Result<(), DomainError>,
    ) -> Result<u32, DomainError> {
        let number = self.posted;
        self.submit(|| post(number))?;
        self.posted = number.wrapping_add(1);
        Ok(number)
    }

    /// Posts what is left in a chain by `post`.
    #[inline]
    pub fn submit(
        &mut self,
        post: impl FnOnce() -> Result<(), DomainError>,
    ) -> Result<(), DomainError> {
        if self.refused {
            return Err(DomainError::LinkDown("the NIC has refused an earlier request".into()));
        }
        post().inspect_err(|_| self.refused = true)
    }

    /// Enters a work request of which all requests from `first` on are posted. `entry` has the
    /// bytes that it touches.
    #[inline]
    pub fn enter(&mut self, token: Token, first: u32, (region, from, to): (RegionKey, u64, u64)) {
        let last = self.posted.wrapping_sub(1);
        self.entries.push_back(Entry { token, first, last, region, from, to });
    }

    /// Enters a work request of which the NIC took a part; false if it took none.
    pub fn enter_partial(&mut self, token: Token, first: u32) -> bool {
        let some = self.posted != first;
        if some {
            self.enter(token, first, Default::default());
        }
        some
    }

    /// A flush read of the last `writes` entries is posted: its completion completes them.
    pub fn flushed_by(&mut self, writes: usize, last: u32) {
        let from = self.entries.len() - writes;
        self.entries.range_mut(from..).for_each(|e| e.last = last);
    }

    /// The full number of a completed request.
    #[inline]
    pub fn number(&self, seq: u32) -> u32 {
        self.retired.wrapping_add(seq.wrapping_sub(self.retired) & super::SEQ_MASK)
    }

    /// Retires a request and all before it; calls `done` for each completed entry.
    #[inline]
    pub fn retire(&mut self, number: u32, mut done: impl FnMut(Token)) {
        self.retired = number.wrapping_add(1);
        let waiting = self.unflushed.map_or(0, |u| u.writes);
        while self.entries.len() > waiting {
            let Some(e) = self.entries.front() else { return };
            if self.retired.wrapping_sub(e.last.wrapping_add(1)) > u32::MAX / 2 {
                return;
            }
            done(e.token);
            self.entries.pop_front();
        }
    }

    /// The entry that a failed request belongs to.
    pub fn entry_of(&self, number: u32) -> Option<Entry> {
        let at = |e: &&Entry| number.wrapping_sub(e.first) < u32::MAX / 2;
        // The last entry that begins at or before it; a flush read belongs to the last entry it
        // covers.
        self.entries.iter().rev().find(at).copied()
    }

    /// Removes all entries, to be failed.
    pub fn abandon(&mut self) -> impl Iterator<Item = Token> + '_ {
        self.entries.drain(..).map(|e| e.token)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use rustix::io::Errno;

    use super::*;

    fn token(slot: u32) -> Token {
        Token { slot, ..Token::default() }
    }

    fn refuse() -> Result<(), DomainError> {
        Err(DomainError::Io { call: "ibv_post_send", errno: Errno::NOMEM })
    }

    /// Posts a write of two requests without a count.
    fn write(ledger: &mut Ledger, slot: u32) {
        let first = ledger.push(|_| Ok(())).unwrap();
        ledger.push(|_| Ok(())).unwrap();
        ledger.submit(|| Ok(())).unwrap();
        ledger.enter(token(slot), first, Default::default());
        let writes = ledger.unflushed.map_or(0, |u| u.writes) + 1;
        let region = RegionKey::default();
        ledger.unflushed = Some(Unflushed { writes, bytes: 2, region, addr: 0, rkey: 0 });
    }

    fn retired(ledger: &mut Ledger, number: u32) -> Vec<u32> {
        let mut done = Vec::new();
        ledger.retire(number, |t| done.push(t.slot));
        done
    }

    #[test]
    fn ic_2_a_flush_read_completes_the_writes_before_it() {
        let mut ledger = Ledger::new(16);
        write(&mut ledger, 1);
        write(&mut ledger, 2);
        let writes = ledger.unflushed.take().unwrap().writes;
        let last = ledger.push(|_| Ok(())).unwrap();
        ledger.flushed_by(writes, last);
        assert!(retired(&mut ledger, last - 1).is_empty());
        assert_eq!((retired(&mut ledger, last), ledger.room()), (vec![1, 2], 15));
    }

    #[test]
    fn ic_2_nothing_is_posted_after_a_request_that_the_nic_refused() {
        let mut ledger = Ledger::new(16);
        write(&mut ledger, 1);
        // The NIC takes the first request of the second write, and no more for now.
        let first = ledger.push(|_| Ok(())).unwrap();
        ledger.push(|_| refuse()).unwrap_err();
        assert!(ledger.enter_partial(token(2), first));
        // It has room again, but a later completion would pass for that of the second write.
        let mut posted = Vec::new();
        for _ in 0..2 {
            let accept = |number| {
                posted.push(number);
                Ok(())
            };
            if let Ok(number) = ledger.push(accept) {
                assert!(retired(&mut ledger, number).is_empty(), "a write in part is done");
            }
        }
        assert!(posted.is_empty() && ledger.is_refused(), "{posted:?}");
        assert_eq!(ledger.abandon().map(|t| t.slot).collect::<Vec<_>>(), [1, 2]);
    }

    #[test]
    fn a_chain_that_the_nic_refused_ends_its_write_with_the_link() {
        let mut ledger = Ledger::new(16);
        let first = ledger.push(|_| Ok(())).unwrap();
        ledger.submit(refuse).unwrap_err();
        assert!(ledger.enter_partial(token(1), first) && ledger.push(|_| Ok(())).is_err());
        assert!(!ledger.enter_partial(token(2), ledger.next()), "nothing of it was posted");
    }
}
