//! Caches of every form: the rank of each head, in which order the dimensions lie, in how many
//! buffers.

use fabric_kvcache::layout::{BufferOffset, CacheGroup, CacheLayout, CacheTensor};
use proptest::prelude::*;

/// What both ends agree on of a group.
#[derive(Clone, Debug)]
pub struct Model {
    pub name: String,
    pub layers: Vec<u32>,
    pub window: Option<u32>,
    /// Whether a request has one page, with a state; forms then have pages of one token.
    pub is_state: bool,
    /// Name, heads, width in bytes.
    pub tensors: Vec<(String, u32, u32)>,
}

/// A dimension of a cache in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dim {
    Page,
    Layer,
    Tensor,
    Head,
    Token,
}

pub use Dim::{Head, Layer, Page, Tensor, Token};

/// How one end lays its caches out.
#[derive(Clone, Debug)]
pub struct Form {
    pub page_tokens: u32,
    pub block_tokens: Option<u32>,
    pub pages: u32,
    /// From the outermost to the innermost.
    pub order: Vec<Dim>,
    /// Unused bytes after each step of a dimension, in the same order.
    pub gaps: Vec<u64>,
    /// Whether outermost layers and tensors have buffers of their own.
    pub split: bool,
    /// Whether the tensors are listed from last to first.
    pub reversed: bool,
    /// Whether tensors of one shape change places in every other layer.
    pub swapped: bool,
}

impl Form {
    pub fn dense(page_tokens: u32, pages: u32, order: [Dim; 5]) -> Self {
        Self {
            page_tokens,
            block_tokens: None,
            pages,
            order: order.to_vec(),
            gaps: vec![0; 5],
            split: false,
            reversed: false,
            swapped: false,
        }
    }
}

/// Heads first and how many, on a rank of `ranks`, of `heads`: divided, or repeated by neighbours.
pub fn shard(heads: u32, rank: u32, ranks: u32) -> (u32, u32) {
    if heads >= ranks {
        let end = |r: u32| r * heads / ranks;
        (end(rank), end(rank + 1) - end(rank))
    } else {
        (rank * heads / ranks, 1)
    }
}

/// A rank's cache. `held` says which heads of a tensor of so many it holds.
pub fn cache(models: &[(Model, Form)], held: impl Fn(u32) -> (u32, u32)) -> CacheLayout {
    let mut buffers = Vec::new();
    let groups = models.iter().map(|(m, f)| group(m, f, &held, &mut buffers)).collect();
    CacheLayout { model: "m".into(), groups, buffers, is_stage: false }
}

/// All ranks of an instance whose heads are divided or repeated in order.
pub fn instance(models: &[(Model, Form)], ranks: u32) -> Vec<CacheLayout> {
    (0..ranks).map(|rank| cache(models, |heads| shard(heads, rank, ranks))).collect()
}

fn group(
    model: &Model,
    form: &Form,
    held: &impl Fn(u32) -> (u32, u32),
    buffers: &mut Vec<u64>,
) -> CacheGroup {
    // Tensors of one shape are a dimension; others, unless innermost, lie one after the other.
    let (heads, width) = (model.tensors[0].1, model.tensors[0].2);
    let same = model.tensors.iter().all(|t| t.1 == heads && t.2 == width);
    let rows = model.tensors.iter().all(|t| t.1 == heads) && form.order[4] == Tensor;
    let mut tensors = if same || rows {
        packed(&model.tensors, model, form, held, buffers)
    } else {
        let one =
            |t: &(String, u32, u32)| packed(std::slice::from_ref(t), model, form, held, buffers);
        model.tensors.iter().flat_map(one).collect()
    };
    if form.reversed {
        tensors.reverse();
    }
    CacheGroup {
        name: model.name.clone(),
        layers: model.layers.clone(),
        page_tokens: form.page_tokens,
        is_state: model.is_state,
        block_tokens: form.block_tokens,
        pages: form.pages,
        window: model.window,
        tensors,
    }
}

/// Tensors of one shape, or of rows that lie side by side.
fn packed(
    tensors: &[(String, u32, u32)],
    model: &Model,
    form: &Form,
    held: &impl Fn(u32) -> (u32, u32),
    buffers: &mut Vec<u64>,
) -> Vec<CacheTensor> {
    let heads = tensors[0].1;
    let (first_head, held_heads) = held(heads);
    let layers = model.layers.len() as u64;
    let count = |dim: Dim| match dim {
        Page => form.pages.into(),
        Layer => layers,
        Tensor => tensors.len() as u64,
        Head => held_heads.into(),
        Token => form.page_tokens.into(),
    };
    let mut stride = [0u64; 5];
    let mut extent: u64 = tensors[0].2.into();
    let mut row_starts: Vec<u64> = Vec::new();
    for (&dim, gap) in form.order.iter().zip(&form.gaps).rev() {
        if dim == Tensor && extent == u64::from(tensors[0].2) {
            row_starts = tensors
                .iter()
                .scan(0, |at, t| {
                    let start = *at;
                    *at += u64::from(t.2) + gap;
                    Some(start)
                })
                .collect();
            extent = tensors.iter().map(|t| u64::from(t.2) + gap).sum();
            continue;
        }
        stride[dim as usize] = extent + gap;
        extent = count(dim) * (extent + gap);
    }
    // What is outermost may be cut into buffers.
    let mut own: Vec<Dim> = Vec::new();
    if form.split {
        own = form.order.iter().copied().take_while(|d| matches!(d, Layer | Tensor)).collect();
        if !row_starts.is_empty() {
            own.retain(|&d| d != Tensor);
        }
    }
    let length = own.last().map_or(extent, |&d| stride[d as usize]);
    let start = buffers.len() as u64;
    buffers.extend((0..own.iter().map(|&d| count(d)).product::<u64>()).map(|_| length));
    let place = |tensor: u64, layer: u64| {
        let tensor = match form.swapped && row_starts.is_empty() && layer % 2 == 1 {
            true => tensors.len() as u64 - 1 - tensor,
            false => tensor,
        };
        let index = |dim: Dim| if dim == Layer { layer } else { tensor };
        let buffer = own.iter().fold(0, |b, &d| b * count(d) + index(d));
        let mut offset = row_starts.get(tensor as usize).copied().unwrap_or(0);
        for dim in [Layer, Tensor].into_iter().filter(|d| !own.contains(d)) {
            offset += index(dim) * stride[dim as usize];
        }
        BufferOffset { buffer: (start + buffer) as u32, offset }
    };
    (0..)
        .zip(tensors)
        .map(|(t, (name, heads, width))| CacheTensor {
            name: name.clone(),
            heads: *heads,
            first_head,
            held_heads,
            width: *width,
            dtype: "uint8".into(),
            page_stride: stride[Page as usize],
            head_stride: stride[Head as usize],
            token_stride: stride[Token as usize],
            places: (0..layers).map(|l| place(t, l)).collect(),
        })
        .collect()
}

/// Keys and values, a latent with its rope, or both with an indexer's keys of one head.
pub fn models() -> impl Strategy<Value = Model> {
    let kv = (1u32..9, 1u32..5).prop_map(|(heads, width)| {
        vec![("k".to_string(), heads, width), ("v".to_string(), heads, width)]
    });
    let mla = (1u32..5, 1u32..4).prop_map(|(latent, rope)| {
        vec![("latent".to_string(), 1, latent), ("rope".to_string(), 1, rope)]
    });
    let indexed = (2u32..5, 1u32..4).prop_map(|(heads, width)| {
        let kv = ["k", "v"].map(|n| (n.to_string(), heads, width));
        kv.into_iter().chain([("index".to_string(), 1, 3)]).collect()
    });
    let tensors = prop_oneof![3 => kv, 2 => mla, 1 => indexed];
    let kind = prop_oneof![
        2 => Just((None, false)),
        1 => (1u32..40).prop_map(|window| (Some(window), false)),
        1 => Just((None, true)),
    ];
    (tensors, 1usize..4, kind).prop_map(|(tensors, layers, (window, is_state))| Model {
        name: "g".into(),
        layers: (0..layers as u32).map(|l| 3 * l).collect(),
        window,
        is_state,
        tensors,
    })
}

/// Any order, with or without gaps, in one buffer or several.
pub fn forms(pages: u32) -> impl Strategy<Value = Form> {
    let order = Just(vec![Page, Layer, Tensor, Head, Token]).prop_shuffle();
    let gaps = prop_oneof![
        2 => Just(vec![0; 5]),
        1 => prop::collection::vec(prop_oneof![3 => Just(0), 1 => 1u64..6], 5),
    ];
    let flags = (any::<bool>(), any::<bool>(), any::<bool>());
    (1u32..9, order, gaps, flags).prop_map(
        move |(page_tokens, order, gaps, (split, reversed, swapped))| Form {
            page_tokens,
            block_tokens: None,
            pages,
            order,
            gaps,
            split,
            reversed,
            swapped,
        },
    )
}
