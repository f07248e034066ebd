//! The receiver's end of a ring of tokens, and the beginnings of those slots that were looked at: what peers wrote there is
//! the host's to check (MR-3), wherever the rows behind lie.

use super::{
    context::{by, Context, Stop},
    jobs::{Begun, Call, Job},
    ring::{Inbound, Place},
};

#[derive(Debug)]
pub struct Reader {
    pub ring: Inbound,
    looking: Begun<()>,
    /// Of slots from the first that wasn't read, behind one another; and how much of it was read.
    seen: Vec<u8>,
    read: usize,
}

impl Reader {
    pub fn new(place: Place) -> Self {
        Self { ring: Inbound::new(place), looking: Begun::default(), seen: Vec::new(), read: 0 }
    }

    /// Slots that have come and weren't read, looked at or not.
    pub fn ready(&self, ctx: &Context) -> Result<u64, Stop> {
        self.ring.ready(&ctx.words).map_err(by(self.ring.place.partner))
    }

    /// Looks at the first `nbytes` of up to a chunk of the next `left` slots; returns how many are seen.
    pub fn look(
        &mut self,
        ctx: &Context,
        call: &mut Call<'_, '_, '_>,
        nbytes: u64,
        left: u64,
    ) -> Result<u64, Stop> {
        let seen = self.seen(nbytes);
        if self.looking.is_empty() && call.may_begin() {
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
            self.seen.extend(bytes);
        }
        Ok(self.seen(nbytes))
    }

    fn seen(&self, nbytes: u64) -> u64 {
        (self.seen.len() - self.read) as u64 / nbytes
    }

    /// Where the next slot but `ahead` is, and its first `nbytes`, which were looked at.
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
