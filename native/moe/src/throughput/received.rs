//! The tokens of one lane that came to this rank, as their answers need them.

use super::{
    context::{Arrivals, Context},
    jobs::SumTerm,
    slots::{experts, read_head, Kind},
};

#[derive(Debug, Default)]
pub struct Received {
    pub tokens: Vec<u32>,
    /// Of each token, the end of its terms.
    ends: Vec<usize>,
    /// Of each of this rank's experts of a token, in the order in which the token names them: row
    /// and weight.
    terms: Vec<(u32, f32)>,
    /// This rank's experts of the latest token, as its terms.
    named: Vec<u32>,
}

impl Received {
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.ends.clear();
        self.terms.clear();
    }

    /// Gives a token places among the rows of its experts here, behind `rows`; returns how many. An
    /// expert that it names twice has one row, and a term for each.
    ///
    /// # Errors
    /// The violation: tokens out of order, or more rows than announced.
    pub fn take(
        &mut self,
        ctx: &Context,
        arrivals: &mut Arrivals,
        (channel, source): (u32, u32),
        slot: &[u8],
        rows: &mut Vec<u32>,
    ) -> Result<u32, String> {
        let spec = &ctx.spec;
        let token = read_head(slot, Kind::Token, ctx.exchange)?;
        if self.tokens.last().is_some_and(|last| *last >= token) || token >= spec.shape.max_tokens {
            return Err(format!("it sent token {token} out of order"));
        }
        let local = spec.shape.local_experts();
        let first = ctx.grid.rank * local;
        let before = self.terms.len();
        self.named.clear();
        let first_row = rows.len();
        for (expert, weight) in experts(spec, slot) {
            let Some(expert) = expert.checked_sub(first).filter(|e| *e < local) else { continue };
            let place = match self.named.iter().position(|e| *e == expert) {
                Some(earlier) => self.terms[before + earlier].0,
                None => {
                    let place = arrivals.take(channel, source, expert).ok_or_else(|| {
                        format!("it sent more rows for expert {} than it announced", first + expert)
                    })?;
                    rows.push(place);
                    place
                }
            };
            self.named.push(expert);
            self.terms.push((place, weight));
        }
        if self.terms.len() == before {
            return Err(format!("it sent token {token}, of which no expert is here"));
        }
        self.tokens.push(token);
        self.ends.push(self.terms.len());
        Ok((rows.len() - first_row) as u32)
    }

    /// The terms of this rank's answer to a token: the answers of its experts times their weights,
    /// in order.
    pub fn terms(&self, i: usize) -> impl Iterator<Item = SumTerm> + '_ {
        let begin = i.checked_sub(1).map_or(0, |before| self.ends[before]);
        let end = self.ends[i];
        let each = self.terms[begin..end].iter().enumerate();
        each.map(move |(i, (row, weight))| SumTerm::Row {
            row: *row,
            weight: *weight,
            last: begin + i + 1 == end,
        })
    }
}
