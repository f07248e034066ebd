//! What can be wrong with a request between two instances that fit.

use super::Side;

/// A request that can't be answered; nothing of it was sent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    #[error("{side} rank {rank} isn't among the {ranks}; count from 0")]
    NoRank { side: Side, rank: usize, ranks: usize },
    #[error("group {group} isn't among the {groups}; count from 0")]
    NoGroup { group: usize, groups: usize },
    #[error(
        "layer {layer} isn't among the {layers} of the group; count them in the group, from 0"
    )]
    NoLayer { layer: usize, layers: usize },
    #[error("tokens {have} to {tokens} are none that can be sent; give a prefix of the prompt")]
    Tokens { have: u64, tokens: u64 },
    #[error(
        "a prefix of {have} tokens ends within a page of {page_tokens} of group {group:?}; give \
         whole pages, others are written over"
    )]
    PartPage { group: String, have: u64, page_tokens: u64 },
    #[error(
        "the {side}'s page table of group {group:?} has {entries} entries but {needed} are needed; \
         give one for each page of the request"
    )]
    ShortTable { side: Side, group: String, entries: usize, needed: u64 },
    #[error(
        "entry {entry} of the {side}'s page table of group {group:?} is page {page}, but rank \
         {rank} has {pages} pages"
    )]
    NoPage { side: Side, group: String, rank: usize, entry: u64, page: u32, pages: u32 },
    #[error("cells {start} to {end} are none of a request; take them from `cells` and `ready`")]
    Cells { start: u64, end: u64 },
}
