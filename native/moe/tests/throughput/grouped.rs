//! What tokens, experts and their answers are in these tests, and what must come of them in the
//! order of the mode: a rank's experts as the token names them, a node's ranks, the nodes; rounded
//! wherever a sum leaves a rank or a node.

use fabric_moe::{
    kernels::{Float, Part, PartMut},
    routes::Order,
    throughput::Spec,
    AnswerFormat, Dispatched, Shape,
};
use half::bf16;

/// Elements of a token, and of an answer.
pub const WIDE: usize = 5;
/// Bytes that go with a token beside its elements.
pub const EXTRA: usize = 3;

/// `nodes` of `per_node` ranks with `local` experts each.
pub fn spec(nodes: u32, per_node: u32, local: u32, topk: u32, max_tokens: u32) -> Spec {
    let ranks = nodes * per_node;
    let shape = Shape {
        ranks,
        experts: ranks * local,
        topk,
        max_tokens,
        row_nbytes: (WIDE * 4 + EXTRA) as u32,
        back: AnswerFormat { elements: WIDE as u32, float: Float::Bf16 },
        private_rows: 0,
        shared_rows: None,
    };
    Spec { shape, ranks_per_node: per_node, channels: 2, chunk: 4, ring_chunks: 2, threads: 1 }
}

/// One rank's tokens in one exchange.
#[derive(Clone, Debug)]
pub struct Batch {
    spec: Spec,
    pub values: Vec<f32>,
    pub extra: Vec<u8>,
    pub indices: Vec<i64>,
    pub weights: Vec<f32>,
}

impl Batch {
    /// Whichever experts; `hot` is one that most tokens go to.
    pub fn random(rng: &mut fastrand::Rng, spec: &Spec, hot: Option<u32>) -> Self {
        let shape = &spec.shape;
        let tokens = match rng.u32(..8) {
            0 => 0,
            1 => 1.min(shape.max_tokens),
            2 => shape.max_tokens,
            _ => rng.u32(..=shape.max_tokens),
        } as usize;
        let topk = shape.topk as usize;
        let mut indices = Vec::new();
        for _ in 0..tokens {
            let mut experts: Vec<i64> = (0..i64::from(shape.experts)).collect();
            rng.shuffle(&mut experts);
            if let Some(hot) = hot.filter(|_| rng.u32(..4) > 0) {
                let at = experts.iter().position(|e| *e == i64::from(hot)).unwrap_or(0);
                experts.swap(0, at);
            }
            let none = rng.u32(..9) == 0;
            let picked = experts.into_iter().take(topk);
            indices.extend(picked.map(|e| if none || rng.u32(..6) == 0 { -1 } else { e }));
        }
        let values = (0..tokens * WIDE).map(|_| rng.f32() - 0.5).collect();
        let extra = (0..tokens * EXTRA).map(|_| rng.u8(..)).collect();
        let weights = (0..tokens * topk).map(|_| rng.f32()).collect();
        Self { spec: *spec, values, extra, indices, weights }
    }

    pub fn tokens(&self) -> usize {
        self.extra.len() / EXTRA
    }

    pub fn with_parts<T>(
        &self,
        send: impl FnOnce(&[Part<'_>], &[i64], Option<Part<'_>>) -> T,
    ) -> T {
        let values: Vec<u8> = self.values.iter().flat_map(|v| v.to_ne_bytes()).collect();
        let weights: Vec<u8> = self.weights.iter().flat_map(|v| v.to_ne_bytes()).collect();
        let parts = [
            Part { bytes: &values, stride: WIDE * 4, width: WIDE * 4 },
            Part { bytes: &self.extra, stride: EXTRA, width: EXTRA },
        ];
        let width = self.spec.shape.topk as usize * 4;
        send(&parts, &self.indices, Some(Part { bytes: &weights, stride: width, width }))
    }

    /// How many times a token goes to another node than `node`.
    pub fn crossings(&self, node: u32) -> u64 {
        let topk = self.spec.shape.topk as usize;
        let nodes_of = |experts: &[i64]| {
            let mut nodes: Vec<u32> =
                experts.iter().filter(|e| **e >= 0).map(|e| self.node(*e)).collect();
            nodes.sort_unstable();
            nodes.dedup();
            nodes.iter().filter(|n| **n != node).count() as u64
        };
        self.indices.chunks(topk).map(nodes_of).sum()
    }

    fn node(&self, expert: i64) -> u32 {
        self.spec.shape.rank_of(expert as u32) / self.spec.ranks_per_node
    }

    /// The ranks of this batch's experts that aren't here.
    pub fn missing(&self, here: &[bool]) -> Vec<u32> {
        let experts = self.indices.iter().filter(|e| **e >= 0);
        let mut ranks: Vec<u32> = experts
            .map(|e| self.spec.shape.rank_of(*e as u32))
            .filter(|r| !here[*r as usize])
            .collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    /// The sums if all are here.
    pub fn sums(&self) -> Vec<f32> {
        self.sums_of(&vec![true; self.spec.shape.ranks as usize])
    }

    /// The sums of the present ranks. If a rank is missing, every rank is a node of its own.
    pub fn sums_of(&self, here: &[bool]) -> Vec<f32> {
        let (shape, topk) = (&self.spec.shape, self.spec.shape.topk as usize);
        let per_node = if here.contains(&false) { 1 } else { self.spec.ranks_per_node };
        let mut out = Vec::new();
        for token in 0..self.tokens() {
            let terms: Vec<(u32, f32)> = (0..topk)
                .map(|k| (self.indices[token * topk + k], self.weights[token * topk + k]))
                .filter(|(expert, _)| *expert >= 0)
                .map(|(expert, weight)| (expert as u32, weight))
                .filter(|(expert, _)| here[shape.rank_of(*expert) as usize])
                .collect();
            let values = &self.values[token * WIDE..][..WIDE];
            let extra = &self.extra[token * EXTRA..][..EXTRA];
            let mut total = [0f32; WIDE];
            for node in 0..shape.ranks / per_node {
                let mut of_node = [0f32; WIDE];
                let ranks = node * per_node..(node + 1) * per_node;
                let mut any = false;
                for rank in ranks {
                    let mut of_rank = [0f32; WIDE];
                    let here: Vec<_> =
                        terms.iter().filter(|(e, _)| shape.rank_of(*e) == rank).collect();
                    for (expert, weight) in &here {
                        let answer = answer(*expert, values, extra);
                        of_rank.iter_mut().zip(answer).for_each(|(s, a)| *s += weight * a);
                    }
                    if !here.is_empty() {
                        any = true;
                        of_node.iter_mut().zip(of_rank).for_each(|(s, v)| *s += round(v));
                    }
                }
                if any {
                    total.iter_mut().zip(of_node).for_each(|(s, v)| *s += round(v));
                }
            }
            out.extend(total);
        }
        out
    }
}

fn round(value: f32) -> f32 {
    bf16::from_f32(value).to_f32()
}

/// What an expert makes of a token: a bf16.
fn answer(expert: u32, values: &[f32], extra: &[u8]) -> Vec<f32> {
    let shift = f32::from(extra[0]) - f32::from(extra[EXTRA - 1]);
    values.iter().map(|v| round(v * (expert + 1) as f32 + shift)).collect()
}

pub fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_ne_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// Rows that a rank was handed.
#[derive(Debug, Default)]
pub struct Handed {
    values: Vec<u8>,
    extra: Vec<u8>,
}

impl Handed {
    pub fn room(rows: u64) -> Self {
        // What isn't written is seen.
        let rows = rows as usize;
        Self { values: vec![0xee; rows * WIDE * 4], extra: vec![0xee; rows * EXTRA] }
    }

    pub fn parts(&mut self) -> [PartMut<'_>; 2] {
        [
            PartMut { bytes: &mut self.values, stride: WIDE * 4, width: WIDE * 4 },
            PartMut { bytes: &mut self.extra, stride: EXTRA, width: EXTRA },
        ]
    }

    /// The answers of a rank's experts to these rows.
    pub fn answers(&self, spec: &Spec, rank: u32, placing: &Dispatched) -> Vec<u8> {
        let values = floats(&self.values);
        let mut answers = vec![bf16::ZERO; values.len()];
        for (local, (start, n)) in placing.starts.iter().zip(&placing.counts).enumerate() {
            let expert = rank * spec.shape.local_experts() + local as u32;
            for row in *start as usize..(start + n) as usize {
                let extra = &self.extra[row * EXTRA..][..EXTRA];
                let one = answer(expert, &values[row * WIDE..][..WIDE], extra);
                for (place, value) in answers[row * WIDE..].iter_mut().zip(one) {
                    *place = bf16::from_f32(value);
                }
            }
        }
        answers.iter().flat_map(|v| v.to_ne_bytes()).collect()
    }
}

pub fn rows_of_answers(bytes: &[u8]) -> Part<'_> {
    Part { bytes, stride: WIDE * 2, width: WIDE * 2 }
}

/// What `take` puts there for each of a batch's tokens.
pub fn sums(
    tokens: usize,
    take: impl FnOnce(&mut PartMut<'_>) -> fabric_engine::Result<()>,
) -> fabric_engine::Result<Vec<f32>> {
    let mut out = vec![0xeeu8; tokens * WIDE * 4];
    take(&mut PartMut { bytes: &mut out, stride: WIDE * 4, width: WIDE * 4 })?;
    Ok(floats(&out))
}

pub const ORDERS: [Order; 2] = [Order::Packed { multiple: 4 }, Order::Packed { multiple: 1 }];
