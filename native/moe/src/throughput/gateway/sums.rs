//! The way back: ranks' answers into the node's sums.

use super::{
    super::{
        commands::Commands,
        context::{bits, by, Context, StopCause},
        jobs::{Call, Job, Sum, SumTarget, SumTerm},
        reader::Reader,
    },
    Gateway, Output, Summing,
};

impl Gateway {
    /// Sums answers as far as they have come, and sends the sums; those of this rank's own tokens
    /// stay here.
    pub fn sum(
        &mut self,
        ctx: &Context,
        commands: &mut Commands,
        call: &mut Call<'_, '_, '_>,
    ) -> Result<bool, StopCause> {
        let mut moved = false;
        if let Output::Ring { ring, .. } = &mut self.output {
            moved = ring.update(&ctx.words, commands).map_err(by(ring.layout.partner))?;
        }
        for answers in self.answers.iter_mut().flatten() {
            moved |= answers.skip_earlier(ctx, commands, call)?;
        }
        while self.summed < self.records.len() && call.may_begin() {
            let n = self.summable(ctx, call)?;
            if n == 0 {
                break;
            }
            self.sum_some(ctx, call, n);
            moved |= self.send_sums(ctx, commands, call)?;
        }
        Ok(moved | self.send_sums(ctx, commands, call)?)
    }

    /// Number of tokens that all ranks have answered and the output has room for, up to a chunk
    /// (RS-1).
    fn summable(&self, ctx: &Context, call: &Call<'_, '_, '_>) -> Result<usize, StopCause> {
        let most = match &self.output {
            Output::Own => ctx.spec.chunk as usize,
            Output::Ring { ring, .. } => {
                (ring.room() as usize - self.on_their_way()).min(ctx.spec.chunk as usize)
            }
        };
        let mut left = Vec::with_capacity(self.answers.len());
        for ring in &self.answers {
            left.push(match ring {
                Some(reader) => reader.ready(ctx)?,
                None if call.io.has_answers() => u64::MAX,
                None => 0,
            });
        }
        let mut n = 0;
        for (_, mask) in self.records[self.summed..].iter().take(most) {
            if bits(*mask).any(|local| left[local as usize] == 0) {
                break;
            }
            bits(*mask).for_each(|local| left[local as usize] -= 1);
            n += 1;
        }
        Ok(n)
    }

    /// Sums that are being made.
    fn on_their_way(&self) -> usize {
        self.summing.iter().map(|s| s.tokens).sum()
    }

    fn sum_some(&mut self, ctx: &Context, call: &mut Call<'_, '_, '_>, n: usize) {
        let made_before = self.on_their_way();
        let (mut sums, mut terms) = (Vec::with_capacity(n), Vec::new());
        for i in self.summed..self.summed + n {
            let (token, mask) = self.records[i];
            let before = terms.len();
            for local in bits(mask) {
                match &mut self.answers[local as usize] {
                    Some(Reader { ring, .. }) => {
                        terms.push(SumTerm::Slot { at: ring.next(0), from: ring.layout.partner });
                        ring.taken += 1;
                    }
                    None => {
                        terms.extend(self.received.terms(self.received_summed));
                        self.received_summed += 1;
                    }
                }
            }
            let at = match &self.output {
                Output::Own => 0,
                Output::Ring { ring, outbox } => {
                    let slot = (ring.sent + (made_before + sums.len()) as u64) % ring.layout.slots;
                    outbox + slot * ring.layout.stride
                }
            };
            sums.push(Sum { at, token, terms: (terms.len() - before) as u32 });
        }
        self.summed += n;
        let (to, from) = match &self.output {
            Output::Own => (SumTarget::Node, Vec::new()),
            Output::Ring { .. } => (SumTarget::Slot, sums.iter().map(|sum| sum.at).collect()),
        };
        let read = self.answers.iter().map(|r| r.as_ref().map_or(0, |r| r.ring.taken)).collect();
        let then = Summing { tokens: n, from, read };
        self.summing.begin(call, ctx.exchange, Job::Sum { to, sums, terms }, then);
    }

    /// Sends the sums that are made, and gives back the answers that they were made of.
    fn send_sums(
        &mut self,
        ctx: &Context,
        commands: &mut Commands,
        call: &mut Call<'_, '_, '_>,
    ) -> Result<bool, StopCause> {
        let mut moved = false;
        while let Some((one, _)) = self.summing.done(call, ctx.exchange)? {
            self.made += one.tokens;
            if let Output::Ring { ring, .. } = &mut self.output {
                ring.send(&one.from, commands);
            }
            let last = self.is_summed();
            for (ring, read) in self.answers.iter_mut().zip(&one.read) {
                let Some(Reader { ring, .. }) = ring else { continue };
                ring.credit(*read, ctx.spec.chunk, last, commands);
            }
            moved = true;
        }
        Ok(moved)
    }
}
