//! The layout of one rank's paged cache: the tensors, layers and heads it holds, and their offsets.
//!
//! A layout comes from a peer. [`CacheLayout::check`] comes first; all other code relies on it.

mod check;
mod overlap;

use fabric_engine::EngineError;
use serde::{Deserialize, Serialize};

pub use check::{
    LayoutError, LayoutProblem, MAX_BUFFERS, MAX_BUFFER_BYTES, MAX_GROUPS, MAX_HEADS, MAX_LAYERS,
    MAX_MODEL_BYTES, MAX_NAME_BYTES, MAX_PAGE_TOKENS, MAX_PLACES, MAX_TENSORS,
};

/// One rank's cache. All lengths are bytes unless said otherwise.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheLayout {
    /// Identifies the activations: model, revision and everything else that must agree.
    pub model: String,
    /// Layers that are paged alike: most models have one group, hybrid ones several.
    pub groups: Vec<CacheGroup>,
    /// The length of each registered region that holds pages.
    pub buffers: Vec<u64>,
    /// Whether its instance is one stage of a pipeline, and others have the model's other layers.
    #[serde(default)]
    pub is_stage: bool,
}

/// Layers whose tokens lie in the same pages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheGroup {
    /// The kind of its layers; a kind may have several groups.
    pub name: String,
    /// The numbers of the layers in the model, in the order in which they are computed. A kind has
    /// each number once.
    pub layers: Vec<u32>,
    /// Tokens of a page.
    pub page_tokens: u32,
    /// Pages that there are, numbered from 0.
    pub pages: u32,
    /// Tokens that these layers look back; `None` for all of them.
    pub window: Option<u32>,
    /// Tokens of the blocks that the engine gives requests, and reuses as a whole. Of a block that
    /// a window begins in, all pages are needed. `None` where pages are reused one by one.
    #[serde(default)]
    pub block_tokens: Option<u32>,
    /// Whether its layers are recurrent: a request has one page, with the state after all of its
    /// tokens. Such pages count as one token.
    #[serde(default)]
    pub is_state: bool,
    /// Tensors of each layer, for example keys and values.
    pub tensors: Vec<CacheTensor>,
}

/// One tensor of each layer of a group: pages x heads x tokens x width in any order, width
/// innermost.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheTensor {
    pub name: String,
    /// Heads of the whole model; 1 for what isn't divided by heads.
    pub heads: u32,
    /// The first of those heads that this rank holds.
    pub first_head: u32,
    /// Number of heads held.
    pub held_heads: u32,
    /// Elements of one head of one token; they lie side by side.
    pub width: u32,
    /// As numpy and torch name it, `bfloat16` for example.
    pub dtype: String,
    /// From one page to the next.
    pub page_stride: u64,
    pub head_stride: u64,
    pub token_stride: u64,
    /// Start of page 0, for each layer of the group.
    pub places: Vec<BufferOffset>,
}

/// An offset in one of the buffers of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BufferOffset {
    pub buffer: u32,
    pub offset: u64,
}

impl CacheGroup {
    /// Pages of a request of so many tokens.
    pub fn pages_of(&self, tokens: u64) -> u64 {
        match self.is_state {
            true => tokens.min(1),
            false => tokens.div_ceil(u64::from(self.page_tokens)),
        }
    }

    /// The first token of a request that is needed: the first that the next token sees, or the
    /// first of its block (RS-1).
    pub fn first_needed(&self, tokens: u64) -> u64 {
        let seen = self.window.map_or(0, |window| tokens.saturating_sub(window.into()));
        seen - seen % u64::from(self.block_tokens.unwrap_or(1))
    }

    /// Whether so many leading tokens are whole pages, which need not be sent; a state is sent
    /// however many there are.
    pub fn is_whole_pages(&self, tokens: u64) -> bool {
        self.is_state || tokens.is_multiple_of(u64::from(self.page_tokens))
    }
}

impl CacheTensor {
    /// Bytes of one head of one token; `None` if the dtype isn't known.
    pub fn row_bytes(&self) -> Option<u64> {
        Some(u64::from(self.width) * dtype_bytes(&self.dtype)?)
    }
}

/// Bytes of one element, by the name that numpy and torch have for it.
fn dtype_bytes(name: &str) -> Option<u64> {
    Some(match name {
        "bool" | "uint8" | "int8" => 1,
        "float8_e4m3fn" | "float8_e4m3fnuz" | "float8_e5m2" | "float8_e5m2fnuz"
        | "float8_e8m0fnu" => 1,
        "int16" | "uint16" | "float16" | "bfloat16" => 2,
        "int32" | "uint32" | "float32" => 4,
        "int64" | "uint64" | "float64" | "complex64" => 8,
        _ => return None,
    })
}

impl CacheLayout {
    /// As Python's `fabric_ray.kvcache.CacheLayout` encodes it; see [`CacheLayout::check`] for
    /// whether it makes sense.
    ///
    /// # Errors
    /// [`EngineError::Decode`] says what is missing or of another kind.
    pub fn from_msgpack(bytes: &[u8]) -> Result<Self, EngineError> {
        rmp_serde::from_slice(bytes)
            .map_err(|e| EngineError::Decode { what: "a cache layout", cause: e.to_string() })
    }
}
