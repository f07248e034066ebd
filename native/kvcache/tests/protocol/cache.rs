//! A rank's cache with bytes that say which layer, tensor, head and token they are of.

use fabric_engine::{Region, Result, TransferEngine};
use fabric_kvcache::layout::{BufferOffset, CacheGroup, CacheLayout, CacheTensor};

/// What instances of one test have in common.
#[derive(Clone, Debug)]
pub struct Shape {
    pub layers: u32,
    pub heads: u32,
    pub width: u32,
    pub window: Option<u32>,
}

impl Shape {
    /// One rank of `ranks`: keys and values of its heads in one buffer, heads before tokens.
    pub fn layout(&self, rank: u32, ranks: u32, page_tokens: u32, pages: u32) -> CacheLayout {
        let held = (self.heads / ranks).max(1);
        let first = rank * self.heads / ranks;
        let (token, head) = (u64::from(self.width), u64::from(self.width * page_tokens));
        let one = head * u64::from(held);
        let page = 2 * one;
        let layer = page * u64::from(pages);
        let tensor = |name: &str, offset: u64| CacheTensor {
            name: name.to_owned(),
            heads: self.heads,
            first_head: first,
            held_heads: held,
            width: self.width,
            dtype: "uint8".into(),
            page_stride: page,
            head_stride: head,
            token_stride: token,
            places: (0..u64::from(self.layers))
                .map(|l| BufferOffset { buffer: 0, offset: l * layer + offset })
                .collect(),
        };
        let group = CacheGroup {
            name: "all".into(),
            layers: (0..self.layers).collect(),
            page_tokens,
            is_state: false,
            block_tokens: None,
            pages,
            window: self.window,
            tensors: vec![tensor("k", 0), tensor("v", one)],
        };
        CacheLayout {
            model: "test".into(),
            groups: vec![group],
            buffers: vec![layer * u64::from(self.layers)],
            is_stage: false,
        }
    }
}

/// The bytes of one head of one token, of one request.
fn bytes_of(
    request: u64,
    layer: usize,
    tensor: usize,
    head: u32,
    token: u64,
    width: u32,
) -> Vec<u8> {
    let seed = request
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .wrapping_add(token.wrapping_mul(0xff51_afd7_ed55_8ccd))
        .wrapping_add((layer as u64) << 40 | (tensor as u64) << 32 | u64::from(head));
    let mut rng = fastrand::Rng::with_seed(seed);
    (0..width).map(|_| rng.u8(1..)).collect()
}

#[derive(Clone, Debug)]
pub struct Cache {
    pub layout: CacheLayout,
    pub region: Region,
}

impl Cache {
    pub fn new(engine: &TransferEngine, layout: CacheLayout) -> Result<Self> {
        let region = engine.alloc(layout.buffers[0])?;
        Ok(Self { layout, region })
    }

    /// Calls `f` with the place of each head of these tokens, and the bytes that belong there.
    fn each(
        &self,
        request: u64,
        layers: std::ops::Range<usize>,
        tokens: std::ops::Range<u64>,
        table: &[u32],
        mut f: impl FnMut(u64, Vec<u8>),
    ) {
        let group = &self.layout.groups[0];
        for layer in layers {
            for (t, tensor) in group.tensors.iter().enumerate() {
                for head in 0..tensor.held_heads {
                    for token in tokens.clone() {
                        let page = table[(token / u64::from(group.page_tokens)) as usize];
                        let at = tensor.places[layer].offset
                            + u64::from(page) * tensor.page_stride
                            + u64::from(head) * tensor.head_stride
                            + token % u64::from(group.page_tokens) * tensor.token_stride;
                        let number = tensor.first_head + head;
                        f(at, bytes_of(request, layer, t, number, token, tensor.width));
                    }
                }
            }
        }
    }

    /// Computes these tokens of a layer.
    pub fn compute(&self, request: u64, layer: usize, tokens: std::ops::Range<u64>, table: &[u32]) {
        self.each(request, layer..layer + 1, tokens, table, |at, bytes| {
            self.region.put(at, &bytes).unwrap();
        });
    }

    /// Whether all layers have these tokens of a request.
    pub fn holds(
        &self,
        request: u64,
        tokens: std::ops::Range<u64>,
        table: &[u32],
    ) -> Result<(), String> {
        let layers = self.layout.groups[0].layers.len();
        let mut wrong = None;
        self.each(request, 0..layers, tokens, table, |at, bytes| {
            let got = self.region.get(at, bytes.len() as u64).unwrap();
            if got != bytes && wrong.is_none() {
                wrong = Some(format!("at {at}: {got:?}, should be {bytes:?}"));
            }
        });
        wrong.map_or(Ok(()), Err)
    }

    /// Overwrites whole pages in all layers, as their next owner would; or checks that they are
    /// unchanged.
    pub fn pages(&self, table: &[u32]) -> Vec<(u64, u64)> {
        let group = &self.layout.groups[0];
        let tensor = &group.tensors[0];
        let places = tensor.places.iter();
        places
            .flat_map(|place| {
                table.iter().map(|page| {
                    (place.offset + u64::from(*page) * tensor.page_stride, tensor.page_stride)
                })
            })
            .collect()
    }
}
