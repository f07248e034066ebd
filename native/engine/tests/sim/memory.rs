//! The memory of one incarnation of a node. Every write has bytes and a target of its own, so that
//! any byte that lands is attributed.

use fabric_engine::{Region, TransferEngine};

/// The layout: bytes that peers read, local buffers of writes and reads, then targets of peers'
/// writes.
const READABLE: u64 = 2048;
const LOCAL: u64 = 31 << 10;
const SIZE: u64 = 64 << 10;

/// Fill bytes: never written; source after its transfer; target after its transfer. All bytes that
/// are sent are odd.
const FRESH: u8 = 0;
const SOURCE_OVER: u8 = 0xAA;
const TARGET_OVER: u8 = 0xEE;

/// A pattern that is unique to `id`.
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

/// The target of one write, or of one page.
#[derive(Debug)]
struct Landing {
    offset: u64,
    bytes: Vec<u8>,
    /// All bytes were seen there.
    whole: bool,
    over: bool,
}

impl Memory {
    pub fn new(engine: &TransferEngine, id: u64) -> Self {
        let mut bytes = vec![FRESH; SIZE as usize].into_boxed_slice();
        let at = bytes.as_mut_ptr() as usize;
        // SAFETY: the registration keeps the bytes, and nothing else refers to them.
        let region = unsafe { engine.register(at, SIZE, Some(Box::new(bytes))) }.unwrap();
        let readable = pattern(id, READABLE);
        region.put(0, &readable).unwrap();
        let (next_local, next_landing) = (READABLE, READABLE + LOCAL);
        Self { region, readable, next_local, next_landing, landings: Vec::new() }
    }

    pub fn readable(&self, offset: u64, len: u64) -> &[u8] {
        &self.readable[offset as usize..][..len as usize]
    }

    /// Allocates a local buffer; returns its offset.
    pub fn local(&mut self, len: u64) -> Option<u64> {
        let at = self.next_local;
        let fits = at + len <= READABLE + LOCAL;
        fits.then(|| self.next_local += len)?;
        Some(at)
    }

    /// Allocates the target of `bytes`; returns its index and offset.
    pub fn landing(&mut self, bytes: Vec<u8>) -> Option<(usize, u64)> {
        let (offset, len) = (self.next_landing, bytes.len() as u64);
        // A gap makes overruns visible.
        let next = offset + len + 3;
        (next <= SIZE).then(|| self.next_landing = next)?;
        self.landings.push(Landing { offset, bytes, whole: false, over: false });
        Some((self.landings.len() - 1, offset))
    }

    /// Whether all bytes are there, or were before the target was filled.
    pub fn is_whole(&mut self, landing: usize) -> bool {
        let l = &mut self.landings[landing];
        if !l.whole && !l.over {
            let len = l.bytes.len() as u64;
            l.whole = self.region.with_bytes(l.offset, len, |b| b == l.bytes).unwrap();
        }
        l.whole
    }

    /// Fills a target whose transfer has ended or was counted: no byte may land there any more.
    pub fn end_landing(&mut self, landing: usize) {
        self.is_whole(landing);
        let l = &mut self.landings[landing];
        if l.over {
            return;
        }
        l.over = true;
        self.region.put(l.offset, &vec![TARGET_OVER; l.bytes.len()]).unwrap();
    }

    /// Fills a source whose transfer has ended: the user may reuse it.
    pub fn end_source(&self, offset: u64, len: u64) {
        self.region.put(offset, &vec![SOURCE_OVER; len as usize]).unwrap();
    }

    /// Fills the target of a read that has ended: no byte may land there any more.
    pub fn end_target(&self, offset: u64, len: u64) {
        self.region.put(offset, &vec![TARGET_OVER; len as usize]).unwrap();
    }

    pub fn target_is_untouched(&self, offset: u64, len: u64) -> bool {
        self.all(offset, len, TARGET_OVER)
    }

    fn all(&self, offset: u64, len: u64, byte: u8) -> bool {
        self.region.with_bytes(offset, len, |b| b.iter().all(|b| *b == byte)).unwrap()
    }

    /// The promise that a target breaks at the end of a run, with a description.
    pub fn wrong(&self) -> Option<(&'static str, String)> {
        let mut end = READABLE + LOCAL;
        for (i, l) in self.landings.iter().enumerate() {
            let len = l.bytes.len() as u64;
            if !self.all(end, l.offset - end, FRESH) {
                return Some(("MR-3", format!("bytes landed in the gap before landing {i}")));
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
        rest.then(|| ("MR-2", "bytes landed where nothing was sent to this incarnation".to_owned()))
    }
}
