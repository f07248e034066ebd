//! Copies through memory: blocks, shuffled pages, and the kernel's copy between processes.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use super::raw::{write_vectors, Mapping};
use super::{MemoryKind, Request, Temperature, TextResult};

/// Source and target of blocks, and the position of the next cold block.
#[derive(Debug)]
pub struct Memory {
    source: Mapping,
    target: Mapping,
    kind: MemoryKind,
    walk: usize,
}

impl Memory {
    pub fn new(kind: MemoryKind, region: usize) -> TextResult<Self> {
        let map = match kind {
            MemoryKind::Shared => Mapping::shared,
            MemoryKind::Private => Mapping::private,
        };
        let mut source = map(region)?;
        // Written once, so that reads do not all hit the one shared zero page.
        for (index, page) in source.bytes_mut().chunks_mut(4096).enumerate() {
            page.fill(index as u8);
        }
        let mut target = map(region)?;
        target.bytes_mut().fill(0);
        Ok(Self { source, target, kind, walk: 0 })
    }

    pub fn is(&self, kind: MemoryKind, region: usize) -> bool {
        self.kind == kind && self.region() == region
    }

    fn region(&self) -> usize {
        self.source.bytes().len()
    }

    pub fn slices(&mut self) -> (&[u8], &mut [u8]) {
        (self.source.bytes(), self.target.bytes_mut())
    }

    /// One contiguous block an operation; two threads take one half of the block each.
    pub fn copy(&mut self, request: &Request) -> TextResult<Vec<f64>> {
        let walk = Walk::new(
            self.region() / request.threads,
            request.bytes / request.threads,
            request,
            self.walk,
        );
        let steps = request.operations * request.batches;
        let routine = request.routine;
        let (source, target) = (self.source.bytes(), self.target.bytes_mut());
        let half = source.len() / request.threads;
        let (mine, theirs) = target.split_at_mut(half);
        let block = walk.bytes;
        let seconds = if request.threads == 1 {
            sample(request, |step| {
                let at = walk.at(step);
                routine.copy(&source[at..at + block], &mut mine[at..at + block]);
            })
        } else {
            let (asked, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    for step in 0..steps {
                        spin_until(|| asked.load(Ordering::Acquire) > step);
                        let at = walk.at(step);
                        routine.copy(
                            &source[half + at..half + at + block],
                            &mut theirs[at..at + block],
                        );
                        done.store(step + 1, Ordering::Release);
                    }
                });
                sample(request, |step| {
                    asked.store(step + 1, Ordering::Release);
                    let at = walk.at(step);
                    routine.copy(&source[at..at + block], &mut mine[at..at + block]);
                    spin_until(|| done.load(Ordering::Acquire) > step);
                })
            })
        };
        self.walk = walk.at(steps);
        Ok(seconds)
    }

    /// `pages` pages an operation from successive places to shuffled ones, by `routine`.
    pub fn pages(&mut self, request: &Request) -> TextResult<Vec<f64>> {
        let order = shuffled(self.region() / request.bytes);
        let calls = (order.len() / request.pages).max(1);
        let (bytes, routine) = (request.bytes, request.routine);
        let (source, target) = self.slices();
        Ok(sample(request, |step| {
            let first = page_of(step, calls, request);
            for (page, &place) in order.iter().enumerate().skip(first).take(request.pages) {
                let (from, to) = (page * bytes, place as usize * bytes);
                routine.copy(&source[from..from + bytes], &mut target[to..to + bytes]);
            }
        }))
    }

    /// The same as `pages` through process_vm_writev, `iovecs` pages a call.
    pub fn cma(&mut self, request: &Request) -> TextResult<Vec<f64>> {
        let order = shuffled(self.region() / request.bytes);
        let calls = (order.len() / request.pages).max(1);
        let bytes = request.bytes;
        let source = self.source.bytes();
        let mut places: Vec<Option<&mut [u8]>> =
            self.target.bytes_mut().chunks_exact_mut(bytes).map(Some).collect();
        let mut failure = None;
        let seconds = sample(request, |step| {
            let first = page_of(step, calls, request);
            let mut page = first;
            while page < first + request.pages && failure.is_none() {
                let many = request.iovecs.min(first + request.pages - page);
                let chosen = page..page + many;
                let mut pairs: Vec<(&[u8], &mut [u8])> = chosen
                    .clone()
                    .filter_map(|p| {
                        Some((&source[p * bytes..][..bytes], places[order[p] as usize].take()?))
                    })
                    .collect();
                failure = write_vectors(&mut pairs).err();
                for (p, (_, place)) in chosen.zip(pairs) {
                    places[order[p] as usize] = Some(place);
                }
                page += many;
            }
        });
        failure.map_or(Ok(seconds), Err)
    }
}

/// Offset of block number `step`: always 0 when hot, increasing when cold.
#[derive(Debug, Clone, Copy)]
struct Walk {
    start: usize,
    bytes: usize,
    blocks: usize,
}

impl Walk {
    fn new(region: usize, bytes: usize, request: &Request, start: usize) -> Self {
        // Each block starts on a line of its own, so that streaming stores apply.
        let stride = bytes.max(1).next_multiple_of(64);
        let blocks = match request.temperature {
            Temperature::Cold => (region / stride).max(1),
            Temperature::Hot => 1,
        };
        Self { start: (start / stride) % blocks, bytes, blocks }
    }

    fn at(&self, step: usize) -> usize {
        ((self.start + step) % self.blocks) * self.bytes.max(1).next_multiple_of(64)
    }
}

fn page_of(step: usize, calls: usize, request: &Request) -> usize {
    match request.temperature {
        Temperature::Cold => (step % calls) * request.pages,
        Temperature::Hot => 0,
    }
}

/// Seconds of one operation, for each batch of operations.
fn sample(request: &Request, mut operation: impl FnMut(usize)) -> Vec<f64> {
    (0..request.batches)
        .map(|batch| {
            let start = Instant::now();
            for step in 0..request.operations {
                operation(batch * request.operations + step);
            }
            start.elapsed().as_secs_f64() / request.operations as f64
        })
        .collect()
}

/// A fixed permutation (Fisher-Yates over a 64-bit xorshift), the same in every run.
pub fn shuffled(count: usize) -> Vec<u32> {
    let mut order: Vec<u32> = (0..count as u32).collect();
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for index in (1..count).rev() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        order.swap(index, (state % (index as u64 + 1)) as usize);
    }
    order
}

/// Spins, and gives the core away now and then in case the other side needs it.
pub fn spin_until(mut ready: impl FnMut() -> bool) {
    let mut turns = 0u32;
    while !ready() {
        turns = turns.wrapping_add(1);
        if turns & 4095 == 0 {
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
    }
}
