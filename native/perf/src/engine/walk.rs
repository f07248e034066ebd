//! The walk through both regions: source and destination of each step, and the expected result.

use fabric_engine::Region;
use serde::{Deserialize, Serialize};

use super::{Kind, Request};
use crate::floor::{shuffled, Temperature, TextResult};

const CHUNK: usize = 1 << 20;
const WORD: usize = 8;

/// Step `n` moves `pages` pages of `bytes` bytes: successive ones when cold, always the first when
/// hot; paged writes put them to shuffled places of the whole region.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Walk {
    pub bytes: u64,
    pub pages: u32,
    cold: bool,
    shuffled: bool,
    region: u64,
}

impl Walk {
    pub fn new(request: &Request, region: u64) -> TextResult<Self> {
        let shuffled = request.kind == Kind::Pages;
        let pages = if shuffled { request.pages } else { 1 };
        let total = request.bytes.checked_mul(u64::from(pages)).unwrap_or(0);
        if total == 0 || total > region || !request.bytes.is_multiple_of(WORD as u64) {
            return Err(format!(
                "{pages} times {} bytes must be multiples of {WORD} that fit {region} bytes",
                request.bytes
            ));
        }
        let cold = request.temperature == Temperature::Cold;
        Ok(Self { bytes: request.bytes, pages, cold, shuffled, region })
    }

    fn total(&self) -> u64 {
        self.region / self.bytes
    }

    /// The first page of a step.
    pub fn first(&self, step: u64) -> u64 {
        match self.cold {
            true => step % (self.total() / u64::from(self.pages)) * u64::from(self.pages),
            false => 0,
        }
    }

    /// Target page of each page of the region.
    pub fn places(&self) -> Vec<u32> {
        match self.shuffled {
            true => shuffled(self.total() as usize),
            false => (0..self.total() as u32).collect(),
        }
    }

    /// Finds a wrong byte in a region that was zero before `steps` steps of a patterned source.
    pub fn fault(&self, steps: u64, memory: &[u8]) -> Option<String> {
        let places = self.places();
        let mut origin = vec![None; places.len()];
        for step in 0..steps {
            let first = self.first(step) as usize;
            for page in first..first + self.pages as usize {
                origin[places[page] as usize] = Some(page);
            }
        }
        let bytes = self.bytes as usize;
        let (pages, rest) = memory.split_at(origin.len() * bytes);
        for (place, (page, from)) in pages.chunks_exact(bytes).zip(&origin).enumerate() {
            let at = place * bytes;
            match from {
                Some(from) if !patterned(page, from * bytes) => {
                    let from = from * bytes;
                    return Some(format!("bytes {from}.. of the source are not at {at}"));
                }
                None if !zero(page) => return Some(format!("bytes at {at} that no write left")),
                _ => {}
            }
        }
        (!zero(rest)).then(|| "bytes at the end that no write left".into())
    }
}

/// The pattern's word at a multiple of 8: SplitMix64 of its number, never the same twice.
fn word(offset: usize) -> [u8; WORD] {
    let mut z = (offset as u64 / WORD as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    (z ^ (z >> 31)).to_le_bytes()
}

fn patterned(bytes: &[u8], offset: usize) -> bool {
    bytes.chunks_exact(WORD).enumerate().all(|(i, w)| w == word(offset + i * WORD))
}

fn zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|b| *b == 0)
}

/// Gives a source its pattern.
pub fn fill(region: &Region) -> TextResult<()> {
    each_chunk(region, |at, chunk| {
        for (i, w) in chunk.chunks_exact_mut(WORD).enumerate() {
            w.copy_from_slice(&word(at + i * WORD));
        }
    })
}

/// Zeroes a target.
pub fn clear(region: &Region) -> TextResult<()> {
    each_chunk(region, |_, chunk| chunk.fill(0))
}

fn each_chunk(region: &Region, mut make: impl FnMut(usize, &mut [u8])) -> TextResult<()> {
    let mut chunk = vec![0; CHUNK];
    for at in (0..region.len() as usize).step_by(CHUNK) {
        let part = &mut chunk[..CHUNK.min(region.len() as usize - at)];
        make(at, part);
        region.put(at as u64, part).map_err(|e| e.to_string())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn walk(kind: &str) -> Walk {
        let line = format!("{{\"kind\":\"{kind}\",\"bytes\":64,\"pages\":4}}");
        Walk::new(&serde_json::from_str(&line).unwrap(), 4096).unwrap()
    }

    fn delivered(walk: &Walk, steps: u64) -> Vec<u8> {
        let (places, mut memory) = (walk.places(), vec![0; 4096]);
        for step in 0..steps {
            let first = walk.first(step);
            for page in first..first + u64::from(walk.pages) {
                let (from, to) = (page as usize * 64, places[page as usize] as usize * 64);
                for at in (0..64).step_by(WORD) {
                    memory[to + at..to + at + WORD].copy_from_slice(&word(from + at));
                }
            }
        }
        memory
    }

    #[test]
    fn only_exact_delivery_is_no_fault() {
        for kind in ["write", "pages"] {
            let walk = walk(kind);
            assert_eq!(walk.fault(3, &delivered(&walk, 3)), None, "{kind}");
            for wrong in [2, 4] {
                assert!(walk.fault(3, &delivered(&walk, wrong)).is_some(), "{kind}, {wrong} steps");
            }
            let mut flipped = delivered(&walk, 3);
            flipped[4095] ^= 1;
            assert!(walk.fault(3, &flipped).is_some(), "{kind}");
        }
    }

    #[test]
    fn paged_writes_meet_every_place_of_the_region_once() {
        let mut places = walk("pages").places();
        assert!(!places.is_sorted());
        places.sort_unstable();
        assert_eq!(places, (0..64).collect::<Vec<_>>());
    }

    #[test]
    fn a_step_that_does_not_fit_is_refused() {
        for request in
            ["\"bytes\":8192", "\"bytes\":0", "\"bytes\":12", "\"bytes\":64,\"pages\":65"]
        {
            let line = format!("{{\"kind\":\"pages\",{request}}}");
            assert!(Walk::new(&serde_json::from_str(&line).unwrap(), 4096).is_err(), "{request}");
        }
    }
}
