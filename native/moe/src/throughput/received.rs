//! The tokens of one lane that came to this rank, as their answers need them.

use super::{
    context::{Arrivals, Context},
    slots::{experts, read_head, Kind},
};
use crate::kernels::{add, store, Part, PartMut};

#[derive(Debug, Default)]
pub struct Received {
    pub tokens: Vec<u32>,
    /// Of each token, the end of its terms.
    ends: Vec<usize>,
    /// Of each of this rank's experts of a token, in the order in which the token names them: row and weight.
    terms: Vec<(u32, f32)>,
}

impl Received {
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.ends.clear();
        self.terms.clear();
    }

    /// Copies a token to the rows of its experts here.
    ///
    /// # Errors
    /// What can't be in the slot: tokens out of order, more rows than were announced.
    pub fn take(
        &mut self,
        ctx: &Context,
        arrivals: &mut Arrivals,
        (channel, source): (u32, u32),
        slot: &[u8],
        out: &mut [PartMut<'_>],
    ) -> Result<(), String> {
        let spec = &ctx.spec;
        let token = read_head(slot, Kind::Token, ctx.exchange)?;
        if self.tokens.last().is_some_and(|last| *last >= token) || token >= spec.shape.max_tokens {
            return Err(format!("it sent token {token} out of order"));
        }
        let local = spec.shape.local_experts();
        let first = ctx.grid.rank * local;
        let row = &slot[spec.meta() as usize..];
        let before = self.terms.len();
        for (expert, weight) in experts(spec, slot) {
            let Some(expert) = expert.checked_sub(first).filter(|e| *e < local) else { continue };
            let place = arrivals.take(channel, source, expert).ok_or_else(|| {
                format!("it sent more rows for expert {} than it announced", first + expert)
            })?;
            let mut begin = 0;
            for part in out.iter_mut() {
                let to = part.row(place as usize);
                let n = to.len();
                to.copy_from_slice(&row[begin..begin + n]);
                begin += n;
            }
            self.terms.push((place, weight));
        }
        if self.terms.len() == before {
            return Err(format!("it sent token {token}, of which no expert is here"));
        }
        self.tokens.push(token);
        self.ends.push(self.terms.len());
        Ok(())
    }

    /// This rank's answer to a token: its experts' answers, each times its weight, summed in 32-bit floats in their order.
    pub fn answer(
        &self,
        ctx: &Context,
        i: usize,
        answers: &Part<'_>,
        sum: &mut [f32],
        out: &mut [u8],
    ) {
        let begin = i.checked_sub(1).map_or(0, |before| self.ends[before]);
        let float = ctx.spec.shape.back.float;
        sum.fill(0.0);
        for (row, weight) in &self.terms[begin..self.ends[i]] {
            add(sum, answers.row(*row as usize), float, *weight, true);
        }
        store(sum, out, float);
    }
}
