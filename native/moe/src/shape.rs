//! The parameters that all ranks of an exchange agree on.

use fabric_engine::{EngineError, Result};
use serde::{Deserialize, Serialize};

use crate::kernels::Float;

/// Rows begin at multiples of this, bytes: the alignment of GPU loads and of NICs.
pub const ALIGN: u64 = 16;

/// Format of an expert's answer to one token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AnswerFormat {
    /// Elements of a row: the model's hidden dimension.
    pub elements: u32,
    pub float: Float,
}

/// Shape of an exchange, equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    /// Ranks, absent ones included.
    pub ranks: u32,
    /// Experts of all ranks; rank `r` hosts those from `r * experts / ranks`.
    pub experts: u32,
    /// Experts of each token.
    pub topk: u32,
    /// Tokens that a rank dispatches at a time, at most.
    pub max_tokens: u32,
    /// Bytes of a token on its way to an expert: activations, scales and whatever else goes with
    /// them.
    pub row_nbytes: u32,
    pub back: AnswerFormat,
    /// Rows that each source may send to each rank before that rank has sent a slot offer.
    pub private_rows: u32,
    /// Rows of the shared buffer; `None` for as many as can ever come, so that no source waits.
    pub shared_rows: Option<u32>,
}

impl Shape {
    /// An expert for each rank, one for each token, and as many private rows as there are tokens.
    #[cfg(test)]
    pub fn small(ranks: u32) -> Self {
        Self {
            ranks,
            experts: ranks,
            topk: 1,
            max_tokens: 4,
            row_nbytes: 16,
            back: AnswerFormat { elements: 8, float: Float::F32 },
            private_rows: 4,
            shared_rows: None,
        }
    }

    /// # Errors
    /// [`EngineError::Invalid`], naming the field.
    pub fn check(&self) -> Result<()> {
        let wrong = |text: String| Err(EngineError::Invalid(text));
        let limits = [
            ("ranks", self.ranks, 1, 4096),
            ("experts", self.experts, 1, 1 << 16),
            ("topk", self.topk, 1, 256),
            ("max_tokens", self.max_tokens, 1, 1 << 20),
            ("row_nbytes", self.row_nbytes, 1, 1 << 20),
            ("elements of an answer", self.back.elements, 1, 1 << 20),
            ("shared_rows", self.shared_rows.unwrap_or(1), 1, u32::MAX),
        ];
        for (what, value, low, high) in limits {
            if !(low..=high).contains(&value) {
                return wrong(format!("{what} is {value}; give {low} to {high}"));
            }
        }
        if !self.experts.is_multiple_of(self.ranks) {
            return wrong(format!(
                "{} experts can't be spread over {} ranks evenly; add experts that no token goes to",
                self.experts, self.ranks
            ));
        }
        if self.topk > self.experts {
            return wrong(format!(
                "{} experts for each token, and there are {}; lower topk",
                self.topk, self.experts
            ));
        }
        let most = u64::from(self.ranks) * self.pair_rows();
        if most > u64::from(u32::MAX) {
            return wrong(format!(
                "{most} rows may come to one rank, and rows are counted in 32 bits; lower max_tokens"
            ));
        }
        Ok(())
    }

    /// Experts that each rank hosts.
    pub fn local_experts(&self) -> u32 {
        self.experts / self.ranks
    }

    pub fn rank_of(&self, expert: u32) -> u32 {
        expert / self.local_experts()
    }

    /// Rows that one rank sends, at most.
    pub fn out_rows(&self) -> u64 {
        u64::from(self.max_tokens) * u64::from(self.topk)
    }

    /// Maximum rows from one rank to another. A token sends an expert one row, so the bound is the
    /// smaller of `topk` and the rank's experts. (The paper's bound has the larger of the two.)
    pub fn pair_rows(&self) -> u64 {
        u64::from(self.max_tokens) * u64::from(self.topk.min(self.local_experts()))
    }

    /// Rows that one rank receives, at most, its own included.
    pub fn in_rows(&self) -> u64 {
        u64::from(self.ranks) * self.pair_rows()
    }

    /// Rows of a source that go to its private slot, at most.
    pub fn private_rows(&self) -> u64 {
        u64::from(self.private_rows).min(self.pair_rows())
    }

    /// Rows of the shared buffer: the rows of all others that exceed their private slots, or fewer
    /// if so configured. At least one, because answers leave from there.
    pub fn shared_rows(&self) -> u64 {
        let most = self.in_rows();
        self.shared_rows.map_or(most, |rows| u64::from(rows).min(most)).max(1)
    }

    /// Bytes from one row to the next on the way to experts.
    pub fn row_stride(&self) -> u64 {
        u64::from(self.row_nbytes).next_multiple_of(ALIGN)
    }

    /// Bytes of an answer.
    pub fn back_nbytes(&self) -> u64 {
        u64::from(self.back.elements) * self.back.float.nbytes()
    }

    /// Bytes from one answer to the next.
    pub fn back_stride(&self) -> u64 {
        self.back_nbytes().next_multiple_of(ALIGN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn deepseek(ranks: u32) -> Shape {
        let back = AnswerFormat { elements: 7168, float: Float::Bf16 };
        let row_nbytes = 7168 + 224;
        Shape {
            ranks,
            experts: 256,
            topk: 8,
            max_tokens: 128,
            row_nbytes,
            back,
            private_rows: 32,
            shared_rows: None,
        }
    }

    #[test]
    fn no_more_rows_come_than_a_rank_hosts_experts_of_a_token() {
        assert_eq!(deepseek(64).pair_rows(), 128 * 4);
        assert_eq!(deepseek(8).pair_rows(), 128 * 8);
        assert_eq!(deepseek(64).in_rows(), 64 * 128 * 4);
    }

    #[test]
    fn what_is_wrong_is_named() {
        let uneven = Shape { ranks: 7, ..deepseek(1) };
        assert!(uneven.check().unwrap_err().to_string().contains("evenly"));
        let many = Shape { topk: 257, ..deepseek(1) };
        assert!(many.check().is_err());
        let none = Shape { max_tokens: 0, ..deepseek(1) };
        assert!(none.check().unwrap_err().to_string().contains("max_tokens"));
        deepseek(64).check().unwrap();
    }
}
