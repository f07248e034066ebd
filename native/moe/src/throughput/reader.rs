//! The receiver's end of a ring, and the first bytes of slots that were read. The host checks what
//! peers wrote there (MR-3), wherever the rows behind lie.
//!
//! Slots of an earlier era are skipped: their exchange was abandoned. Slots of a later era stay
//! until this rank has heard of the loss.

use std::cmp::Ordering::{Equal, Greater, Less};

use super::{
    commands::Commands,
    context::{by, Context, StopCause},
    jobs::{Call, Job, PendingJobs},
    ring::Inbound,
    slots::{compare_era, HEAD},
};

#[derive(Debug)]
pub struct Reader {
    pub ring: Inbound,
    /// Looks at heads, to skip slots of earlier eras.
    skipping: PendingJobs<()>,
    /// Looks at slots of this era. Neither takes the results of the other: their sizes differ.
    looking: PendingJobs<()>,
    /// Of slots from the first that wasn't read, behind one another; and how much of it was read.
    seen: Vec<u8>,
    read: usize,
    /// The next slot is of a later era.
    is_ahead: bool,
}

impl Reader {
    pub fn new(ring: Inbound) -> Self {
        let (skipping, looking) = (PendingJobs::default(), PendingJobs::default());
        Self { ring, skipping, looking, seen: Vec::new(), read: 0, is_ahead: false }
    }

    /// Slots of this era that have come and weren't read, looked at or not.
    pub fn ready(&self, ctx: &Context) -> Result<u64, StopCause> {
        if !self.ring.fresh || self.is_ahead {
            return Ok(0);
        }
        self.ring.ready(&ctx.words).map_err(by(self.ring.layout.partner))
    }

    /// Whether this rank goes on only when the sender has filled a slot: none of this era, and none
    /// to skip, is in the ring. True if the sender broke the ring.
    pub fn awaits_slot(&self, ctx: &Context) -> bool {
        self.is_ahead || !self.ring.ready(&ctx.words).is_ok_and(|n| n > 0)
    }

    /// Passes over slots of earlier eras; whether there was one.
    pub fn skip_earlier(
        &mut self,
        ctx: &Context,
        commands: &mut Commands,
        call: &mut Call<'_, '_, '_>,
    ) -> Result<bool, StopCause> {
        if self.ring.fresh || self.is_ahead {
            return Ok(false);
        }
        if self.skipping.is_empty() && call.may_begin() {
            let ready = self.ring.ready(&ctx.words).map_err(by(self.ring.layout.partner))?;
            let n = ready.min(ctx.spec.chunk.into());
            if n > 0 {
                let slots = (0..n).map(|ahead| self.ring.next(ahead)).collect();
                let job = Job::Look { slots, nbytes: HEAD };
                self.skipping.begin(call, ctx.exchange, job, ());
            }
        }
        let Some(((), heads)) = self.skipping.done(call, ctx.exchange)? else { return Ok(false) };
        for head in heads.chunks_exact(HEAD as usize) {
            match compare_era(head, ctx.exchange) {
                Less => self.ring.taken += 1,
                Equal => self.ring.fresh = true,
                Greater => self.is_ahead = true,
            }
            if self.ring.fresh || self.is_ahead {
                break;
            }
        }
        self.ring.credit(self.ring.taken, ctx.spec.chunk, true, commands);
        Ok(true)
    }

    /// Looks at the first `nbytes` of up to a chunk of the next `left` slots; returns how many are
    /// seen.
    pub fn look(
        &mut self,
        ctx: &Context,
        call: &mut Call<'_, '_, '_>,
        nbytes: u64,
        left: u64,
    ) -> Result<u64, StopCause> {
        let seen = self.seen(nbytes);
        if self.ring.fresh && self.looking.is_empty() && call.may_begin() {
            let ready = self.ready(ctx)?.min(left);
            let n = ready.saturating_sub(seen).min(ctx.spec.chunk.into());
            if n > 0 {
                let slots = (seen..seen + n).map(|ahead| self.ring.next(ahead)).collect();
                self.looking.begin(call, ctx.exchange, Job::Look { slots, nbytes }, ());
            }
        }
        while let Some(((), bytes)) = self.looking.done(call, ctx.exchange)? {
            self.seen.drain(..self.read);
            self.read = 0;
            let of_slots = bytes.chunks_exact(nbytes as usize);
            let ours = of_slots.take_while(|b| compare_era(b, ctx.exchange) != Greater);
            let ours = ours.count() * nbytes as usize;
            self.is_ahead = ours < bytes.len();
            self.seen.extend(&bytes[..ours]);
        }
        Ok(self.seen(nbytes))
    }

    fn seen(&self, nbytes: u64) -> u64 {
        (self.seen.len() - self.read) as u64 / nbytes
    }

    /// Offset of the slot `ahead` slots after the next one, and its first `nbytes`, which were
    /// read.
    pub fn slot(&self, ahead: u64, nbytes: u64) -> (u64, &[u8]) {
        let begin = self.read + (ahead * nbytes) as usize;
        (self.ring.next(ahead), self.seen.get(begin..begin + nbytes as usize).unwrap_or(&[]))
    }

    /// Slots were read.
    pub fn advance(&mut self, slots: u64, nbytes: u64) {
        self.ring.taken += slots;
        self.read += (slots * nbytes) as usize;
    }
}
