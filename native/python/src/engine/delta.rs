//! Encodes what changed of copies' bytes since the last version, and applies it at the target.

use std::{
    collections::HashMap,
    ops::Range,
    sync::{
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
        Mutex, PoisonError,
    },
};

use fabric_engine as fe;
use fabric_plan::{delta, Row};
use pyo3::prelude::*;
use twox_hash::XxHash3_64;

use super::{class_arg::ClassArg, copies::Copy, memory::Region, threads::on_threads};
use crate::errors::{raise, OrRaise};

/// Bytes that one thread takes at a time.
const CHUNK: u64 = 1 << 20;
/// Bytes of the length that precedes each encoded chunk.
const HEAD: usize = 4;
/// Number of blocks that tell about how much of a piece changed.
const SAMPLE: u64 = 16;

/// A copy's bytes, cut into blocks that don't cross runs, and chunks of blocks.
struct Piece {
    src_container: u32,
    size: usize,
    run: u64,
    rows: Vec<Row>,
}

/// A block: its offsets in both containers, and its length.
struct Block {
    src: u64,
    dst: u64,
    len: u64,
}

impl Piece {
    fn new(copy: &Copy, itemsize: u64) -> Self {
        let sizes = [8, 4, 2, 1];
        let fits = |&size: &u64| size <= itemsize.max(1) && copy.run.is_multiple_of(size);
        Self {
            src_container: copy.src_container,
            size: sizes.into_iter().find(fits).unwrap_or(1) as usize,
            run: copy.run.max(1),
            rows: copy.rows(),
        }
    }

    fn block_len(&self) -> u64 {
        ((delta::BLOCK * self.size) as u64).min(self.run)
    }

    fn blocks_in_run(&self) -> u64 {
        self.run.div_ceil(self.block_len())
    }

    fn runs_in_row(&self) -> u64 {
        self.rows.first().map_or(1, |row| row.runs.max(1))
    }

    fn runs(&self) -> u64 {
        self.rows.iter().map(|row| row.runs).sum()
    }

    fn nbytes(&self) -> u64 {
        self.runs() * self.run
    }

    fn blocks(&self) -> u64 {
        self.runs() * self.blocks_in_run()
    }

    fn blocks_in_chunk(&self) -> u64 {
        CHUNK.div_ceil(self.block_len())
    }

    fn chunks(&self) -> u64 {
        self.blocks().div_ceil(self.blocks_in_chunk())
    }

    fn chunk(&self, number: u64) -> Range<u64> {
        let begin = number * self.blocks_in_chunk();
        begin..(begin + self.blocks_in_chunk()).min(self.blocks())
    }

    /// Bytes of the copy before a block.
    fn before(&self, block: u64) -> u64 {
        let (run, within) = (block / self.blocks_in_run(), block % self.blocks_in_run());
        run * self.run + within * self.block_len()
    }

    fn block(&self, number: u64) -> Block {
        let (run, within) = (number / self.blocks_in_run(), number % self.blocks_in_run());
        let (row, i) = (&self.rows[(run / self.runs_in_row()) as usize], run % self.runs_in_row());
        let at = within * self.block_len();
        Block {
            src: row.src_offset + i * row.src_stride + at,
            dst: row.dst_offset + i * row.dst_stride + at,
            len: self.block_len().min(self.run - at),
        }
    }

    /// A hash of a block's bytes and of their place at the source.
    fn hash(&self, block: &Block, bytes: &[u8]) -> u64 {
        let container = u64::from(self.src_container).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        XxHash3_64::oneshot_with_seed(container ^ block.src, bytes)
    }
}

fn pieces(copies: &[Copy], itemsizes: &[u64]) -> Vec<Piece> {
    copies.iter().zip(itemsizes).map(|(copy, &size)| Piece::new(copy, size)).collect()
}

/// The bytes of copies as of the last version, and the encoding of what changed since.
#[pyclass(frozen, module = "fabric_ray._native")]
pub(crate) struct DeltaEncoder {
    pieces: Vec<Piece>,
    /// Offset of each piece's last version in `base`.
    base_at: Vec<u64>,
    /// Of `base`, whose lock is held while a push is encoded.
    nbytes: u64,
    base: Mutex<Vec<u8>>,
}

/// A chunk to encode, with its bytes of the last version.
struct Task<'b> {
    piece: usize,
    chunk: u64,
    old: &'b mut [u8],
}

/// What threads know of a piece: encoded bytes so far, and whether it's sent whole.
#[derive(Default)]
struct Progress {
    used: AtomicU64,
    whole: AtomicBool,
}

type Sources<'a> = HashMap<u32, (&'a fe::Region, u64)>;

#[pymethods]
impl DeltaEncoder {
    #[new]
    fn new(copies: Vec<Copy>, itemsizes: Vec<u64>) -> Self {
        let pieces = pieces(&copies, &itemsizes);
        let (mut base_at, mut nbytes) = (Vec::with_capacity(pieces.len()), 0);
        for piece in &pieces {
            base_at.push(nbytes);
            nbytes += piece.nbytes();
        }
        // Not zeros: the first push would wait for the kernel to map their pages.
        Self { pieces, base_at, nbytes, base: Mutex::new(vec![u8::MAX; nbytes as usize]) }
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.nbytes
    }

    #[allow(clippy::too_many_arguments)] // keyword arguments of a Python method
    fn encode(
        &self,
        py: Python<'_>,
        first: usize,
        last: usize,
        sources: HashMap<u32, (ClassArg<'_, Region>, u64)>,
        outbox: ClassArg<'_, Region>,
        at: u64,
        compare: bool,
        share: u64,
        threads: usize,
    ) -> PyResult<Vec<(u64, u64, u64)>> {
        let regions: HashMap<u32, (fe::Region, u64)> = sources
            .into_iter()
            .map(|(c, (region, begin))| (c, (region.0.clone(), begin)))
            .collect();
        let outbox = outbox.0.clone();
        py.detach(|| {
            let sources = regions.iter().map(|(&c, (region, begin))| (c, (region, *begin)));
            let sources = sources.collect();
            let share = if compare { share.max(1) } else { 0 };
            self.encode_all(first..last, &sources, (&outbox, at), share, threads)
        })
        .or_raise(py)
    }
}

impl DeltaEncoder {
    /// As `encode` of Python; a share of 0 compares nothing.
    fn encode_all(
        &self,
        range: Range<usize>,
        sources: &Sources<'_>,
        (outbox, mut at): (&fe::Region, u64),
        share: u64,
        threads: usize,
    ) -> fe::Result<Vec<(u64, u64, u64)>> {
        let pieces = self.pieces.get(range.clone()).ok_or_else(|| {
            fe::EngineError::Invalid(format!("no pieces {range:?} of {}", self.pieces.len()))
        })?;
        let mut base = self.base.lock().unwrap_or_else(PoisonError::into_inner);
        let mut rest = &mut base[self.base_at.get(range.start).map_or(0, |&at| at as usize)..];
        let progress: Vec<Progress> = pieces.iter().map(|_| Progress::default()).collect();
        let mut tasks = Vec::new();
        for (number, piece) in pieces.iter().enumerate() {
            let whole = share == 0 || changed_much(piece, sources, rest, share)?;
            progress[number].whole.store(whole, Relaxed);
            for chunk in 0..piece.chunks() {
                let blocks = piece.chunk(chunk);
                let len = piece.before(blocks.end) - piece.before(blocks.start);
                let (old, after) = std::mem::take(&mut rest).split_at_mut(len as usize);
                rest = after;
                tasks.push(Task { piece: number, chunk, old });
            }
        }
        let encoded = on_threads(tasks, threads, |task| {
            let piece = &pieces[task.piece];
            encode_chunk(piece, sources, task, &progress, piece.nbytes() / share.max(1))
        })?;
        let mut encoded = encoded.into_iter();
        let mut found = Vec::new();
        for (piece, progress) in pieces.iter().zip(&progress) {
            let parts: Vec<(Vec<u8>, u64)> =
                encoded.by_ref().take(piece.chunks() as usize).collect();
            let nbytes: u64 = parts.iter().map(|(bytes, _)| bytes.len() as u64).sum();
            if progress.whole.load(Relaxed) || at + nbytes > outbox.len() {
                found.push((0, 0, 0));
                continue;
            }
            let digest = parts.iter().fold(0u64, |sum, (_, hash)| sum.wrapping_add(*hash));
            found.push((at, nbytes, digest));
            for (bytes, _) in parts {
                outbox.put(at, &bytes)?;
                at += bytes.len() as u64;
            }
        }
        Ok(found)
    }
}

fn source<'a>(piece: &Piece, sources: &Sources<'a>) -> fe::Result<(&'a fe::Region, u64)> {
    sources.get(&piece.src_container).copied().ok_or_else(|| {
        fe::EngineError::Invalid(format!("no source region for container {}", piece.src_container))
    })
}

/// Whether a sample of a large piece says that its encoding would not be short enough.
fn changed_much(piece: &Piece, sources: &Sources<'_>, old: &[u8], share: u64) -> fe::Result<bool> {
    if piece.blocks() < 4 * SAMPLE {
        return Ok(false);
    }
    let (region, begin) = source(piece, sources)?;
    let (mut seen, mut encoded) = (0, 0);
    let sample: Vec<u64> = (0..SAMPLE).map(|i| i * piece.blocks() / SAMPLE).collect();
    let ranges = sample.iter().map(|&number| piece.block(number));
    let ranges: Vec<(u64, u64)> = ranges.map(|block| (begin + block.src, block.len)).collect();
    region.with_ranges(&ranges, |i, new| {
        let old = &old[piece.before(sample[i]) as usize..][..new.len()];
        let count = delta::changes(new, old, piece.size) as u64;
        seen += new.len() as u64;
        encoded += count * piece.size as u64 + count.min(new.len() as u64 / piece.size as u64 / 8);
    })?;
    Ok(encoded * share > seen + seen / 2)
}

/// Encodes a chunk unless its piece is sent whole; either way its last version is the new one then.
fn encode_chunk(
    piece: &Piece,
    sources: &Sources<'_>,
    task: Task<'_>,
    progress: &[Progress],
    budget: u64,
) -> fe::Result<(Vec<u8>, u64)> {
    let (region, begin) = source(piece, sources)?;
    let progress = &progress[task.piece];
    let (mut out, mut hash, mut rest) = (vec![0; HEAD], 0u64, task.old);
    progress.used.fetch_add(HEAD as u64, Relaxed);
    let blocks: Vec<Block> = piece.chunk(task.chunk).map(|number| piece.block(number)).collect();
    let ranges: Vec<(u64, u64)> = blocks.iter().map(|b| (begin + b.src, b.len)).collect();
    region.with_ranges(&ranges, |i, new| {
        let (old, after) = std::mem::take(&mut rest).split_at_mut(new.len());
        rest = after;
        let before = out.len();
        if progress.whole.load(Relaxed) {
            old.copy_from_slice(new);
        } else {
            if delta::encode(new, old, piece.size, &mut out) {
                old.copy_from_slice(new);
            }
            hash = hash.wrapping_add(piece.hash(&blocks[i], new));
        }
        let used = (out.len() - before) as u64;
        if progress.used.fetch_add(used, Relaxed) + used > budget {
            progress.whole.store(true, Relaxed);
        }
    })?;
    let len = (out.len() - HEAD) as u32;
    out[..HEAD].copy_from_slice(&len.to_le_bytes());
    Ok((out, hash))
}

/// Applies what [`DeltaEncoder`] has encoded of the same copies.
#[pyclass(frozen, module = "fabric_ray._native")]
pub(crate) struct DeltaDecoder {
    pieces: Vec<Piece>,
    /// Offset of each piece's target container.
    begins: Vec<u64>,
}

#[pymethods]
impl DeltaDecoder {
    #[new]
    fn new(
        py: Python<'_>,
        copies: Vec<Copy>,
        itemsizes: Vec<u64>,
        offsets: Vec<i64>,
    ) -> PyResult<Self> {
        let begin = |copy: &Copy| {
            let offset = offsets.get(copy.dst_container as usize).copied().unwrap_or(-1);
            u64::try_from(offset).map_err(|_| {
                let text = format!("the target has no container {}", copy.dst_container);
                raise(py, &fe::EngineError::Invalid(text))
            })
        };
        let begins = copies.iter().map(begin).collect::<PyResult<_>>()?;
        Ok(Self { pieces: pieces(&copies, &itemsizes), begins })
    }

    #[allow(clippy::too_many_arguments)] // keyword arguments of a Python method
    fn apply(
        &self,
        py: Python<'_>,
        which: Vec<usize>,
        inbox: ClassArg<'_, Region>,
        at: u64,
        nbytes: u64,
        base: ClassArg<'_, Region>,
        target: ClassArg<'_, Region>,
        threads: usize,
    ) -> PyResult<Option<u64>> {
        let (inbox, base, target) = (inbox.0.clone(), base.0.clone(), target.0.clone());
        let apply = |encoded: &[u8]| {
            let Some(tasks) = self.tasks(&which, encoded) else { return Ok(None) };
            let parts = on_threads(tasks, threads, |(number, chunk, encoded)| {
                self.decode_chunk(number, chunk, encoded, &base, &target)
            })?;
            let sum = |sum: u64, part: Option<u64>| Some(sum.wrapping_add(part?));
            Ok(parts.into_iter().try_fold(0, sum))
        };
        py.detach(|| inbox.with_bytes(at, nbytes, apply)?).or_raise(py)
    }
}

impl DeltaDecoder {
    /// Pieces and chunks with their encoding; `None` if the bytes are no such encoding.
    fn tasks<'e>(
        &self,
        which: &[usize],
        mut encoded: &'e [u8],
    ) -> Option<Vec<(usize, u64, &'e [u8])>> {
        let mut tasks = Vec::new();
        for &number in which {
            for chunk in 0..self.pieces.get(number)?.chunks() {
                let (head, rest) = encoded.split_first_chunk::<HEAD>()?;
                let (part, rest) = rest.split_at_checked(u32::from_le_bytes(*head) as usize)?;
                tasks.push((number, chunk, part));
                encoded = rest;
            }
        }
        encoded.is_empty().then_some(tasks)
    }

    /// The digest of the chunk's bytes in the target; `None` if its encoding is none.
    fn decode_chunk(
        &self,
        number: usize,
        chunk: u64,
        mut encoded: &[u8],
        base: &fe::Region,
        target: &fe::Region,
    ) -> fe::Result<Option<u64>> {
        let (piece, begin) = (&self.pieces[number], self.begins[number]);
        let (in_place, mut hash) = (base.addr() == target.addr(), 0u64);
        let mut bytes = vec![0; piece.block_len() as usize];
        for block in piece.chunk(chunk).map(|number| piece.block(number)) {
            let (at, bytes) = (begin + block.dst, &mut bytes[..block.len as usize]);
            base.with_bytes(at, block.len, |old| bytes.copy_from_slice(old))?;
            let Some(rest) = delta::decode(bytes, piece.size, encoded) else { return Ok(None) };
            hash = hash.wrapping_add(piece.hash(&block, bytes));
            // In place, a block whose encoding is its head alone is there already.
            if !in_place || encoded.len() - rest.len() > delta::HEAD {
                target.put(at, bytes)?;
            }
            encoded = rest;
        }
        Ok(encoded.is_empty().then_some(hash))
    }
}
