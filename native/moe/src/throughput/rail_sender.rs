//! Sends a source's tokens for another node: each once, over the rail, in chunks.

use super::{
    commands::Commands,
    context::{by, Context, StopCause},
    grid::Family,
    reader::Reader,
    ring::Outbound,
    ring_pool::RingPool,
};

/// One lane of this rank's own to its gateway on another node.
#[derive(Debug)]
pub struct RailSender {
    channel: u32,
    pub node: u32,
    pub ring: Outbound,
    /// The tokens for the node, in order.
    tokens: Vec<u32>,
    /// Slots that were sent: the preamble, then the tokens.
    sent: usize,
    /// The node's sums of their answers.
    pub sums: Reader,
}

impl RailSender {
    pub fn new(ctx: &Context, pool: &mut RingPool, channel: u32, node: u32) -> Self {
        let gateway = ctx.grid.at(node, ctx.grid.local());
        let own = ctx.grid.node();
        let ring = pool.outbound(ctx.outbound(channel, Family::RailOut, own, gateway));
        let sums = ctx.inbound(channel, Family::RailBack, own, gateway);
        let sums = pool.inbound(sums, ctx.is_first_era());
        Self { channel, node, ring, tokens: Vec::new(), sent: 1, sums }
    }

    pub fn return_rings(self, pool: &mut RingPool) {
        pool.put(self.ring);
        pool.put_back(self.sums);
    }

    pub fn begin(&mut self, tokens: Vec<u32>) {
        self.tokens = tokens;
        self.sent = 0;
    }

    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    pub fn is_done(&self) -> bool {
        self.sent == 1 + self.tokens.len()
    }

    /// Sends whole chunks while the ring has room; whether it sent any.
    pub fn step(&mut self, ctx: &Context, commands: &mut Commands) -> Result<bool, StopCause> {
        let mut moved =
            self.ring.update(&ctx.words, commands).map_err(by(self.ring.layout.partner))?;
        let all = 1 + self.tokens.len();
        while self.sent < all {
            let n = (all - self.sent).min(ctx.spec.chunk as usize);
            if (self.ring.room() as usize) < n {
                break;
            }
            let place = |i: usize| match i.checked_sub(1) {
                None => ctx.layout.preamble(self.channel, self.node),
                Some(i) => ctx.layout.own(self.tokens[i]),
            };
            let from: Vec<u64> = (self.sent..self.sent + n).map(place).collect();
            self.ring.send(&from, commands);
            self.ring.preambles += u64::from(self.sent == 0);
            self.sent += n;
            moved = true;
        }
        Ok(moved)
    }
}
