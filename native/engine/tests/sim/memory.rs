//! The memory of one life of a node: every write has bytes and a place of its own, so that whatever lands can
//! be told apart.

use fabric_engine::{Region, TransferEngine};

/// What others read, then the sources of writes and the targets of reads, then where writes land.
const READABLE: u64 = 2048;
const LOCAL: u64 = 31 << 10;
const SIZE: u64 = 64 << 10;

/// Bytes that were never written, and what a place is filled with when its transfer is over. All that is
/// sent is odd.
const FRESH: u8 = 0;
const SOURCE_OVER: u8 = 0xAA;
const TARGET_OVER: u8 = 0xEE;

/// Bytes that nothing else has.
pub fn pattern(id: u64, len: u64) -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(id);
    let mut bytes = vec![0; len as usize];
    rng.fill(&mut bytes);
    bytes.iter_mut().for_each(|b| *b |= 1);
    bytes
}

#[derive(Debug)]
pub struct Memory {
    pub region: Region,
    readable: Vec<u8>,
    next_local: u64,
    next_landing: u64,
    landings: Vec<Landing>,
}

/// Where one write, or one page, lands.
#[derive(Debug)]
struct Landing {
    offset: u64,
    bytes: Vec<u8>,
    /// Everything was there once.
    whole: bool,
    over: bool,
}

impl Memory {
    pub fn new(engine: &TransferEngine, id: u64) -> Self {
        let mut bytes = vec![FRESH; SIZE as usize].into_boxed_slice();
        let at = bytes.as_mut_ptr() as usize;
        // SAFETY: the registration keeps the bytes, and nobody else has them.
        let region = unsafe { engine.register(at, SIZE, Some(Box::new(bytes))) }.unwrap();
        let readable = pattern(id, READABLE);
        region.put(0, &readable).unwrap();
        let (next_local, next_landing) = (READABLE, READABLE + LOCAL);
        Self { region, readable, next_local, next_landing, landings: Vec::new() }
    }

    pub fn readable(&self, offset: u64, len: u64) -> &[u8] {
        &self.readable[offset as usize..][..len as usize]
    }

    /// A local place of its own.
    pub fn local(&mut self, len: u64) -> Option<u64> {
        let at = self.next_local;
        let fits = at + len <= READABLE + LOCAL;
        fits.then(|| self.next_local += len)?;
        Some(at)
    }

    /// Where `bytes` will land: its number, and the offset.
    pub fn landing(&mut self, bytes: Vec<u8>) -> Option<(usize, u64)> {
        let (offset, len) = (self.next_landing, bytes.len() as u64);
        // A gap, so that a byte too much is seen.
        let next = offset + len + 3;
        (next <= SIZE).then(|| self.next_landing = next)?;
        self.landings.push(Landing { offset, bytes, whole: false, over: false });
        Some((self.landings.len() - 1, offset))
    }

    /// Whether all of it is there, or was before it was filled with something else.
    pub fn is_whole(&mut self, landing: usize) -> bool {
        let l = &mut self.landings[landing];
        if !l.whole && !l.over {
            let len = l.bytes.len() as u64;
            l.whole = self.region.with_bytes(l.offset, len, |b| b == l.bytes).unwrap();
        }
        l.whole
    }

    /// Its transfer is over, or it is counted: nothing may touch the place any more.
    pub fn end_landing(&mut self, landing: usize) {
        self.is_whole(landing);
        let l = &mut self.landings[landing];
        if l.over {
            return;
        }
        l.over = true;
        self.region.put(l.offset, &vec![TARGET_OVER; l.bytes.len()]).unwrap();
    }

    /// Who sent from here may do with it what they like.
    pub fn end_source(&self, offset: u64, len: u64) {
        self.region.put(offset, &vec![SOURCE_OVER; len as usize]).unwrap();
    }

    /// A read is over: nothing may touch its target any more.
    pub fn end_target(&self, offset: u64, len: u64) {
        self.region.put(offset, &vec![TARGET_OVER; len as usize]).unwrap();
    }

    pub fn target_is_untouched(&self, offset: u64, len: u64) -> bool {
        self.all(offset, len, TARGET_OVER)
    }

    fn all(&self, offset: u64, len: u64, byte: u8) -> bool {
        self.region.with_bytes(offset, len, |b| b.iter().all(|b| *b == byte)).unwrap()
    }

    /// What is wrong with the places where writes land, at the end: the promise, and a sentence.
    pub fn wrong(&self) -> Option<(&'static str, String)> {
        let mut end = READABLE + LOCAL;
        for (i, l) in self.landings.iter().enumerate() {
            let len = l.bytes.len() as u64;
            if !self.all(end, l.offset - end, FRESH) {
                return Some(("MR-3", format!("something landed before landing {i}")));
            }
            end = l.offset + len;
            if l.over && !self.all(l.offset, len, TARGET_OVER) {
                return Some(("MR-1", format!("landing {i} changed after its transfer was over")));
            }
            let known = |b: &[u8]| b.iter().zip(&l.bytes).all(|(b, own)| *b == FRESH || b == own);
            if !l.over && !self.region.with_bytes(l.offset, len, known).unwrap() {
                return Some(("MR-1", format!("landing {i} has bytes that were not its own")));
            }
        }
        let rest = !self.all(end, SIZE - end, FRESH);
        rest.then(|| ("MR-2", "something landed where nothing was sent to this life".to_owned()))
    }
}
