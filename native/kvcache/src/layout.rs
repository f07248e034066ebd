//! What one rank's paged cache looks like: which tensors of which layers it keeps, of which heads, and where.

use serde::{Deserialize, Serialize};

/// One rank's cache. All lengths are bytes unless said otherwise.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheLayout {
    /// Whose activations these are: model, revision and whatever else must agree for the bytes to mean the same.
    pub model: String,
    /// Layers that are paged alike: most models have one group, hybrid ones several.
    pub groups: Vec<CacheGroup>,
    /// The length of each registered region that holds pages.
    pub buffers: Vec<u64>,
}

/// Layers whose tokens lie in the same pages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheGroup {
    pub name: String,
    /// The numbers of the layers in the model, in the order in which they are computed.
    pub layers: Vec<u32>,
    /// Tokens of a page.
    pub page_tokens: u32,
    /// Pages that there are, numbered from 0.
    pub pages: u32,
    /// Tokens that these layers look back; `None` for all of them.
    pub window: Option<u32>,
    /// What each layer keeps of a token, for example keys and values.
    pub tensors: Vec<CacheTensor>,
}

/// One tensor of each layer of a group: pages x heads x tokens x width in any order, width innermost.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheTensor {
    pub name: String,
    /// Heads of the whole model; 1 for what isn't divided by heads.
    pub heads: u32,
    /// The first of those heads that this rank holds.
    pub first_head: u32,
    /// How many it holds.
    pub held_heads: u32,
    /// Elements of one head of one token; they lie side by side.
    pub width: u32,
    /// As numpy and torch name it, `bfloat16` for example.
    pub dtype: String,
    /// From one page to the next.
    pub page_stride: u64,
    pub head_stride: u64,
    pub token_stride: u64,
    /// Where page 0 begins, for each layer of the group.
    pub places: Vec<Place>,
}

/// A place in one of the rank's buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    pub buffer: u32,
    pub offset: u64,
}
