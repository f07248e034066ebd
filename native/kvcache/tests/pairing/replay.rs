//! Byte by byte: where every byte of a target's buffers came from.

use std::ops::Range;

use fabric_engine::api::{PageIndices, Pages};
use fabric_kvcache::layout::{BufferOffset, CacheLayout};
use fabric_kvcache::pairing::{Link, PagedWrite, Pairing, Side};

use crate::caches::{Form, Model};

/// A byte of a source rank: rank, buffer, offset.
pub type Origin = (usize, u32, u64);

/// A target rank's buffers, with what was written to each byte.
#[derive(Debug)]
pub struct Memory {
    pub buffers: Vec<Vec<Option<Origin>>>,
    /// Pages written, which is what the target counts.
    pub counted: u64,
}

impl Memory {
    pub fn of(layout: &CacheLayout) -> Self {
        let buffers = layout.buffers.iter().map(|&len| vec![None; len as usize]).collect();
        Self { buffers, counted: 0 }
    }

    /// Every byte arrives once, from within the source's buffers.
    pub fn write(&mut self, from: usize, source: &CacheLayout, write: &PagedWrite) {
        let (src, dst) = (starts(&write.src_pages), starts(&write.dst_pages));
        assert_eq!(src.len(), dst.len());
        assert!(!src.is_empty() && write.nbytes > 0, "a write moves something");
        self.counted += src.len() as u64;
        let into = &mut self.buffers[write.dst_buffer as usize];
        for (s, d) in src.into_iter().zip(dst) {
            assert!(s + write.nbytes <= source.buffers[write.src_buffer as usize]);
            for i in 0..write.nbytes {
                let byte = &mut into[(d + i) as usize];
                assert_eq!(*byte, None, "byte {} of a buffer comes twice", d + i);
                *byte = Some((from, write.src_buffer, s + i));
            }
        }
    }
}

/// Where each page of a list begins.
pub fn starts(pages: &Pages) -> Vec<u64> {
    let at = |index: u32| pages.offset + u64::from(index) * pages.stride;
    match &pages.indices {
        PageIndices::Range { first, count } => (*first..first + count).map(at).collect(),
        PageIndices::List(_) => pages.list().unwrap().iter().map(|&i| at(i)).collect(),
    }
}

/// One row of a cache: a head of a token of a tensor in a layer.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    pub group: usize,
    pub layer: usize,
    pub head: u32,
    pub token: u64,
}

/// Where a row lies, by the layout's words.
pub fn place(layout: &CacheLayout, tensor: &str, row: Row, table: &[u32]) -> BufferOffset {
    let group = &layout.groups[row.group];
    let t = group.tensors.iter().find(|t| t.name == tensor).unwrap();
    let page_tokens = u64::from(group.page_tokens);
    let page = table[(row.token / page_tokens) as usize];
    let BufferOffset { buffer, offset } = t.places[row.layer];
    let offset = offset
        + u64::from(page) * t.page_stride
        + u64::from(row.head - t.first_head) * t.head_stride
        + row.token % page_tokens * t.token_stride;
    BufferOffset { buffer, offset }
}

/// A request: how many tokens, which the target has, its tables by side and group, and its chunks.
#[derive(Clone, Debug)]
pub struct Request {
    pub tokens: Range<u64>,
    pub salt: u64,
    pub src_tables: Vec<Vec<u32>>,
    pub dst_tables: Vec<Vec<u32>>,
    /// Computed tokens at the end of each chunk; the last is all.
    pub chunks: Vec<u64>,
}

/// Sends a request to one target rank; what it then holds and has counted.
pub fn send(
    pairing: &Pairing,
    source: &[CacheLayout],
    target: &CacheLayout,
    rank: usize,
    request: &Request,
) -> Memory {
    let mut memory = Memory::of(target);
    for (from, sender) in source.iter().enumerate() {
        let link = pairing.link(from, rank, request.salt).unwrap();
        let named = pairing.sources(rank, request.salt).unwrap().contains(&from);
        assert_eq!(named, !link.is_empty(), "sources are those with links that aren't empty");
        let mut done = 0;
        for &chunk in &request.chunks {
            for group in 0..target.groups.len() {
                for write in writes(pairing, &link, group, request, done..chunk) {
                    memory.write(from, sender, &write);
                }
            }
            done = chunk;
        }
    }
    memory
}

fn writes(
    pairing: &Pairing,
    link: &Link,
    group: usize,
    request: &Request,
    done: Range<u64>,
) -> Vec<PagedWrite> {
    let cells = pairing.chunk(group, request.tokens.clone(), done).unwrap();
    let (src, dst) = (&request.src_tables[group], &request.dst_tables[group]);
    let selection = link.select(group, cells.clone(), src, dst).unwrap();
    let layers = pairing.group(group).unwrap().1.len();
    let mut all = Vec::new();
    for layer in 0..layers {
        let of: Vec<PagedWrite> = selection.writes(layer).unwrap().collect();
        let counts: u64 = of.iter().map(PagedWrite::count).sum();
        assert_eq!(counts, link.expected_of_layer(group, layer, cells.clone()).unwrap());
        all.extend(of);
    }
    let counts: u64 = all.iter().map(PagedWrite::count).sum();
    assert_eq!(counts, link.expected(group, cells).unwrap());
    all
}

/// The bytes that must have come, and no others: each row of each token in `sent`, from one rank
/// for each head of a tensor.
pub fn check(
    memory: &Memory,
    source: &[CacheLayout],
    target: &CacheLayout,
    request: &Request,
    sent: &[Range<u64>],
) {
    let mut rest: u64 = memory.buffers.iter().flatten().flatten().count() as u64;
    for (g, group) in target.groups.iter().enumerate() {
        for t in &group.tensors {
            let bytes = t.row_bytes().unwrap();
            for head in t.first_head..t.first_head + t.held_heads {
                let mut sender = None;
                for layer in 0..group.layers.len() {
                    for token in sent[g].clone() {
                        let row = Row { group: g, layer, head, token };
                        let there = place(target, &t.name, row, &request.dst_tables[g]);
                        for i in 0..bytes {
                            let at = (there.offset + i) as usize;
                            let origin = memory.buffers[there.buffer as usize][at];
                            let (rank, buffer, offset) = origin
                                .unwrap_or_else(|| panic!("{} of {row:?} is missing", t.name));
                            assert_eq!(*sender.get_or_insert(rank), rank, "two senders of a head");
                            let from = place(&source[rank], &t.name, row, &request.src_tables[g]);
                            assert_eq!((from.buffer, from.offset + i), (buffer, offset), "{row:?}");
                            rest -= 1;
                        }
                    }
                }
            }
        }
    }
    assert_eq!(rest, 0, "bytes came that were not requested");
}

/// The first token that the next one sees, or the first of the block that a form has it in.
pub fn first_needed(model: &Model, form: &Form, tokens: u64) -> u64 {
    let mut first = tokens - tokens.min(model.window.unwrap_or(u32::MAX).into());
    while !first.is_multiple_of(u64::from(form.block_tokens.unwrap_or(1))) {
        first -= 1;
    }
    first
}

/// The tokens of whole cells that hold what is needed, by the page sizes alone.
pub fn sent_tokens(
    pairing: &Pairing,
    group: usize,
    tokens: Range<u64>,
    model: &Model,
    target: &Form,
) -> Range<u64> {
    let sizes = [Side::Source, Side::Target]
        .map(|side| u64::from(pairing.page_tokens(group, side).unwrap()));
    let boundary = |t: u64| sizes.iter().any(|size| t.is_multiple_of(*size));
    let (have, n) = (tokens.start, tokens.end);
    if have == n {
        return n..n;
    }
    let mut start = have.max(first_needed(model, target, n));
    while !boundary(start) {
        start -= 1;
    }
    let mut end = n;
    while !boundary(end) {
        end += 1;
    }
    start..end
}

/// How many contiguous runs the bytes that came are made of, cell by cell and layer by layer: no
/// way of sending a cell of a layer when it is ready takes fewer writes.
pub fn fewest(
    memory: &Memory,
    pairing: &Pairing,
    target: &CacheLayout,
    request: &Request,
    sent: &[Range<u64>],
) -> u64 {
    let mut bytes = Vec::new();
    for (g, group) in target.groups.iter().enumerate() {
        for t in &group.tensors {
            for head in t.first_head..t.first_head + t.held_heads {
                for layer in 0..group.layers.len() {
                    for token in sent[g].clone() {
                        let cell = pairing.cells(g, 0..token + 1).unwrap().end;
                        let row = Row { group: g, layer, head, token };
                        let there = place(target, &t.name, row, &request.dst_tables[g]);
                        for i in 0..t.row_bytes().unwrap() {
                            let at = there.offset + i;
                            let origin = memory.buffers[there.buffer as usize][at as usize];
                            bytes.push((g, layer, cell, there.buffer, at, origin.unwrap()));
                        }
                    }
                }
            }
        }
    }
    bytes.sort_unstable();
    let goes_on = |pair: &[(usize, usize, u64, u32, u64, Origin)]| {
        let [(g, layer, cell, buffer, at, (rank, from, offset)), next] = pair else { return false };
        *next == (*g, *layer, *cell, *buffer, at + 1, (*rank, *from, offset + 1))
    };
    let joints = bytes.windows(2).filter(|pair| goes_on(pair)).count();
    (bytes.len() - joints) as u64
}
