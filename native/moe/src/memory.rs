//! The layout of each rank's part of the symmetric memory: control, always in host memory, and
//! rows, in the memory of the kernels.
//!
//! | area | rows | written by | when |
//! |---|---|---|---|
//! | routes | one block for each source | that source | at dispatch |
//! | slot offers | one block for each destination | that destination | when it knows where rows go |
//! | outbox | a block of routes and a slot offer for each peer | this rank | before it writes them there |
//! | private | some for each source | that source | at dispatch, with the routes |
//! | shared | for all sources | sources, where a slot offer says; at combine this rank, with answers | |
//! | own | one for each (token, expert) of this rank | at dispatch this rank, with tokens; at combine peers, with answers | |
//! Blocks are control, the others are rows. The last two are used twice (fabric-lib §6.3): writers
//! wait for the owner's fence.

use fabric_engine::{EngineError, Result};

use crate::shape::Shape;

/// Blocks begin at multiples of this, bytes: no two writers share a cache line.
const BLOCK: u64 = 64;
/// Words before the counts in a block of routes.
pub const ROUTES_HEADER: u64 = 4;

/// The offsets of the areas in control or in rows, bytes; equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    shape: Shape,
    routes: u64,
    slot_offers: u64,
    routes_out: u64,
    slot_offers_out: u64,
    control: u64,
    private: u64,
    shared: u64,
    own: u64,
    rows: u64,
}

/// Lays areas behind one another.
#[derive(Default)]
struct Areas {
    end: u64,
}

impl Areas {
    fn next(&mut self, nbytes: Option<u64>) -> Result<u64> {
        let begin = self.end;
        self.end = nbytes
            .and_then(|n| begin.checked_add(n))
            .and_then(|n| n.checked_next_multiple_of(4096))
            .filter(|end| *end < 1 << 46)
            .ok_or_else(|| EngineError::Invalid("the buffers would take over 64 TiB".into()))?;
        Ok(begin)
    }
}

impl Memory {
    /// # Errors
    /// [`EngineError::Invalid`] for an invalid shape.
    pub fn new(shape: Shape) -> Result<Self> {
        shape.check()?;
        let ranks = u64::from(shape.ranks);
        let row = shape.row_stride().max(shape.back_stride());
        let block = routes_stride(&shape);
        let (mut control, mut rows) = (Areas::default(), Areas::default());
        let routes = control.next(ranks.checked_mul(block))?;
        let slot_offers = control.next(ranks.checked_mul(BLOCK))?;
        let routes_out = control.next(ranks.checked_mul(block))?;
        let slot_offers_out = control.next(ranks.checked_mul(BLOCK))?;
        let private = rows.next((ranks * shape.private_rows()).checked_mul(shape.row_stride()))?;
        let shared = rows.next(shape.shared_rows().checked_mul(row))?;
        let own = rows.next(shape.out_rows().checked_mul(row))?;
        let (control, rows) = (control.end, rows.end);
        Ok(Self {
            shape,
            routes,
            slot_offers,
            routes_out,
            slot_offers_out,
            control,
            private,
            shared,
            own,
            rows,
        })
    }

    /// Bytes of a rank's blocks.
    pub fn control_nbytes(&self) -> u64 {
        self.control
    }

    /// Bytes of a rank's rows.
    pub fn rows_nbytes(&self) -> u64 {
        self.rows
    }

    /// Offset and length of the routes of a source.
    pub fn routes(&self, source: u32) -> (u64, u64) {
        let nbytes = (ROUTES_HEADER + u64::from(self.shape.local_experts())) * 4;
        (self.routes + u64::from(source) * routes_stride(&self.shape), nbytes)
    }

    /// Offset of the routes for a peer in the outbox.
    pub fn routes_out(&self, peer: u32) -> u64 {
        self.routes_out + u64::from(peer) * routes_stride(&self.shape)
    }

    /// Offset and length of the slot offer of a destination.
    pub fn slot_offer(&self, destination: u32) -> (u64, u64) {
        (self.slot_offers + u64::from(destination) * BLOCK, 16)
    }

    /// Offset of the slot offer for a peer in the outbox.
    pub fn slot_offer_out(&self, peer: u32) -> u64 {
        self.slot_offers_out + u64::from(peer) * BLOCK
    }

    /// Offset of a row of a source's private slot.
    pub fn private(&self, source: u32, row: u64) -> u64 {
        let rows = u64::from(source) * self.shape.private_rows() + row;
        self.private + rows * self.shape.row_stride()
    }

    /// Offset of a row of the shared buffer, at dispatch.
    pub fn shared(&self, row: u64) -> u64 {
        self.shared + row * self.shape.row_stride()
    }

    /// Offset of an answer in the shared buffer, at combine.
    pub fn shared_back(&self, row: u64) -> u64 {
        self.shared + row * self.shape.back_stride()
    }

    /// Offset of one of this rank's own rows, at dispatch.
    pub fn own(&self, row: u64) -> u64 {
        self.own + row * self.shape.row_stride()
    }

    /// Offset of the answer to one of this rank's own rows, at combine.
    pub fn own_back(&self, row: u64) -> u64 {
        self.own + row * self.shape.back_stride()
    }

    /// Name, contents and length of each area.
    pub fn explain(&self) -> Vec<(&'static str, String, u64)> {
        let s = &self.shape;
        let shared = match s.shared_rows() < s.in_rows() {
            true => format!(
                "{} rows of at most {} that arrive; more arrive in rounds",
                s.shared_rows(),
                s.in_rows()
            ),
            false => format!(
                "{} rows: {} ranks x {} tokens x {} of a token's experts on one rank",
                s.in_rows(),
                s.ranks,
                s.max_tokens,
                s.topk.min(s.local_experts())
            ),
        };
        vec![
            (
                "routes and slot offers",
                format!("blocks for {} ranks, in and out", s.ranks),
                self.control,
            ),
            (
                "private",
                format!("{} rows for each of {} sources", s.private_rows(), s.ranks),
                self.shared - self.private,
            ),
            ("shared", shared, self.own - self.shared),
            (
                "own",
                format!("{} rows: {} tokens x {} experts", s.out_rows(), s.max_tokens, s.topk),
                self.rows - self.own,
            ),
        ]
    }
}

fn routes_stride(shape: &Shape) -> u64 {
    ((ROUTES_HEADER + u64::from(shape.local_experts())) * 4).next_multiple_of(BLOCK)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{kernels::Float, AnswerFormat};

    #[test]
    fn areas_follow_one_another_and_the_explanation_adds_up() {
        let back = AnswerFormat { elements: 24, float: Float::F32 };
        let shape = Shape {
            ranks: 4,
            experts: 8,
            topk: 3,
            max_tokens: 5,
            row_nbytes: 50,
            back,
            private_rows: 2,
            shared_rows: Some(7),
        };
        let memory = Memory::new(shape).unwrap();
        let total: u64 = memory.explain().iter().map(|(.., nbytes)| nbytes).sum();
        assert_eq!(total, memory.control_nbytes() + memory.rows_nbytes());
        assert!(memory.routes(3).0 + memory.routes(3).1 <= memory.slot_offer(0).0);
        assert!(memory.slot_offer(3).0 + memory.slot_offer(3).1 <= memory.routes_out(0));
        assert!(memory.slot_offer_out(3) + 16 <= memory.control_nbytes());
        assert!(memory.private(3, 1) + 64 <= memory.shared(0));
        assert!(memory.shared_back(6) + 96 <= memory.own(0));
        assert!(memory.own_back(14) + 96 <= memory.rows_nbytes());
    }
}
