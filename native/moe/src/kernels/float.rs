//! The floating-point formats of answers.

use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Float {
    F32,
    Bf16,
    F16,
}

impl Float {
    pub fn nbytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    /// The format with this name, as torch has it.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "float32" => Some(Self::F32),
            "bfloat16" => Some(Self::Bf16),
            "float16" => Some(Self::F16),
            _ => None,
        }
    }
}
