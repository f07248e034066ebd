//! What a receiver counts of one link, so that its loss can be made good.

use std::collections::HashMap;

use crate::{
    domain::{Count, Receipt},
    group::MOST_IMMS,
};

/// Writes that came over one link, by immediate.
#[derive(Debug, Default)]
pub(crate) struct Tally(HashMap<u32, u64>);

impl Tally {
    #[inline]
    pub fn add(&mut self, count: Count) {
        if self.0.len() < MOST_IMMS || self.0.contains_key(&count.imm) {
            *self.0.entry(count.imm).or_default() += u64::from(count.n);
        }
    }

    /// With those that another layer has counted of the same link.
    pub fn on_top_of(self, receipt: Receipt) -> Receipt {
        match receipt {
            receipt if self.0.is_empty() => receipt,
            Receipt::ByImm(mut all) => {
                for (imm, n) in self.0 {
                    *all.entry(imm).or_default() += n;
                }
                Tally(all).receipt()
            }
            Receipt::InOrder(_) | Receipt::Unknown => Receipt::Unknown,
        }
    }

    pub fn receipt(self) -> Receipt {
        match self.0.len() < MOST_IMMS {
            true => Receipt::ByImm(self.0),
            false => Receipt::Unknown,
        }
    }
}
