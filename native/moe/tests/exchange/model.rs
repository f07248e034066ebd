//! Tokens, experts and answers of these tests, and the expected results.

use std::collections::BTreeSet;

use fabric_moe::{
    kernels::{Float, Part, PartMut},
    routes::Order,
    AllToAll, AnswerFormat, Shape,
};

/// Elements of a token, and of an answer.
pub const WIDE: usize = 5;
/// Bytes that go with a token beside its elements; so many that rows are longer than answers.
pub const EXTRA: usize = 13;

pub fn shape(ranks: u32, local: u32, topk: u32, max_tokens: u32) -> Shape {
    Shape {
        ranks,
        experts: ranks * local,
        topk,
        max_tokens,
        row_nbytes: (WIDE * 4 + EXTRA) as u32,
        back: AnswerFormat { elements: WIDE as u32, float: Float::F32 },
        private_rows: 2,
        shared_rows: None,
    }
}

/// One rank's tokens in one exchange.
#[derive(Clone, Debug)]
pub struct Batch {
    pub topk: usize,
    pub values: Vec<f32>,
    pub extra: Vec<u8>,
    pub indices: Vec<i64>,
    pub weights: Vec<f32>,
}

impl Batch {
    /// Whichever experts; `hot` is one that most tokens go to.
    pub fn random(rng: &mut fastrand::Rng, shape: &Shape, hot: Option<u32>) -> Self {
        let tokens = match rng.u32(..8) {
            0 => 0,
            1 => 1,
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
            let picked = experts.into_iter().take(topk);
            indices.extend(picked.map(|e| if rng.u32(..6) == 0 { -1 } else { e }));
        }
        let values = (0..tokens * WIDE).map(|_| rng.f32() - 0.5).collect();
        let extra = (0..tokens * EXTRA).map(|_| rng.u8(..)).collect();
        let weights = (0..tokens * topk).map(|_| rng.f32()).collect();
        Self { topk, values, extra, indices, weights }
    }

    pub fn tokens(&self) -> usize {
        self.extra.len() / EXTRA
    }

    /// The rows for an expert.
    fn rows_to(&self, expert: u32) -> Vec<(Vec<u8>, Vec<u8>)> {
        let named = self.indices.chunks(self.topk).enumerate();
        let tokens = named.filter(|(_, of)| of.contains(&i64::from(expert))).map(|(t, _)| t);
        let row = |t: usize| {
            (bytes(&self.values[t * WIDE..][..WIDE]), self.extra[t * EXTRA..][..EXTRA].to_vec())
        };
        tokens.map(row).collect()
    }

    pub fn send(&self, rank: &AllToAll) -> fabric_engine::Result<()> {
        let values = bytes(&self.values);
        let parts = [
            Part { bytes: &values, stride: WIDE * 4, width: WIDE * 4 },
            Part { bytes: &self.extra, stride: EXTRA, width: EXTRA },
        ];
        rank.dispatch_send(&parts, &self.indices)
    }

    /// The sums, if the experts of `gone` ranks add nothing.
    pub fn sums(&self, shape: &Shape, gone: &[u32]) -> Vec<f32> {
        let mut sums = vec![0f32; self.values.len()];
        for token in 0..self.tokens() {
            let sum = &mut sums[token * WIDE..][..WIDE];
            for k in 0..self.topk {
                let expert = self.indices[token * self.topk + k];
                if expert < 0 || gone.contains(&shape.rank_of(expert as u32)) {
                    continue;
                }
                let weight = self.weights[token * self.topk + k];
                let (values, extra) = (&self.values[token * WIDE..], &self.extra[token * EXTRA..]);
                let answer = answer(expert as u32, &values[..WIDE], &extra[..EXTRA]);
                sum.iter_mut().zip(answer).for_each(|(s, a)| *s += weight * a);
            }
        }
        sums
    }
}

/// What an expert makes of a token.
pub fn answer(expert: u32, values: &[f32], extra: &[u8]) -> Vec<f32> {
    let shift = f32::from(extra[0]) - f32::from(extra[EXTRA - 1]);
    values.iter().map(|v| v * (expert + 1) as f32 + shift).collect()
}

pub fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_ne_bytes()).collect()
}

pub fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_ne_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// Rows that a rank was handed.
#[derive(Debug, Default)]
pub struct Handed {
    pub values: Vec<u8>,
    pub extra: Vec<u8>,
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
    pub fn answers(&self, shape: &Shape, rank: u32, counts: &[u32], starts: &[u32]) -> Vec<u8> {
        let values = floats(&self.values);
        let mut answers = vec![0f32; values.len()];
        for (local, (start, n)) in starts.iter().zip(counts).enumerate() {
            let expert = rank * shape.local_experts() + local as u32;
            for row in *start as usize..(start + n) as usize {
                let extra = &self.extra[row * EXTRA..][..EXTRA];
                let one = answer(expert, &values[row * WIDE..][..WIDE], extra);
                answers[row * WIDE..][..WIDE].copy_from_slice(&one);
            }
        }
        bytes(&answers)
    }
}

/// That each local expert's rows are those of its tokens, source by source. A source that was lost
/// may have none, or zeros.
///
/// # Errors
/// Which expert was handed something else.
pub fn check_rows(
    shape: &Shape,
    rank: u32,
    (handed, counts, starts): (&Handed, &[u32], &[u32]),
    sent: &[Option<&Batch>],
    lost: &[u32],
) -> Result<(), String> {
    for (local, (start, n)) in starts.iter().zip(counts).enumerate() {
        let expert = rank * shape.local_experts() + local as u32;
        let end = (start + n) as usize;
        let is = |row: usize, (values, extra): &(Vec<u8>, Vec<u8>)| {
            handed.values[row * WIDE * 4..][..WIDE * 4] == **values
                && handed.extra[row * EXTRA..][..EXTRA] == **extra
        };
        // Where the next source's rows may begin: which of the lost ones have any is not known
        // here.
        let mut begins = BTreeSet::from([*start as usize]);
        for (source, batch) in sent.iter().enumerate() {
            let rows = batch.map(|b| b.rows_to(expert)).unwrap_or_default();
            let blank = (vec![0; WIDE * 4], vec![0; EXTRA]);
            let gone = lost.contains(&(source as u32));
            let whole = |row: &usize| {
                let came = || rows.iter().enumerate().all(|(i, one)| is(row + i, one));
                let zeros = || (0..rows.len()).all(|i| is(row + i, &blank));
                row + rows.len() <= end && (came() || gone && zeros())
            };
            let with = begins.iter().filter(|row| whole(row)).map(|row| row + rows.len());
            let next = with.chain(begins.iter().copied().filter(|_| gone)).collect();
            begins = next;
        }
        if !begins.contains(&end) {
            return Err(format!(
                "expert {expert}: its {n} rows from {start} are not what was sent"
            ));
        }
    }
    Ok(())
}

pub fn rows_of_answers(bytes: &[u8]) -> Part<'_> {
    Part { bytes, stride: WIDE * 4, width: WIDE * 4 }
}

/// Takes answers; returns the sums, and the ranks that are left out of them.
pub fn sums(rank: &AllToAll, batch: &Batch) -> fabric_engine::Result<(Vec<f32>, Vec<u32>)> {
    let mut out = vec![0xeeu8; batch.tokens() * WIDE * 4];
    let weights = bytes(&batch.weights);
    let width = batch.topk * 4;
    let weights = Part { bytes: &weights, stride: width, width };
    let mut part = PartMut { bytes: &mut out, stride: WIDE * 4, width: WIDE * 4 };
    let left_out = rank.combine_recv(Some(weights), &mut part, Float::F32)?;
    Ok((floats(&out), left_out))
}

pub const ORDERS: [Order; 2] = [Order::Packed { multiple: 4 }, Order::Packed { multiple: 1 }];
