use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

const ENTRIES: usize = 2048;

/// Recently written destinations, to guess which are still in the cache.
///
/// Time is counted in bytes copied: a destination is hot if fewer bytes than a share of the cache
/// were copied since its last write. A collision or a lost update only causes a wrong guess.
pub(super) struct RecentWrites {
    clock: AtomicU64,
    /// A page number's tag (upper half) and the clock in KiB (lower half).
    entries: Box<[AtomicU64; ENTRIES]>,
    window_kib: u32,
}

impl RecentWrites {
    pub fn new(window: u64) -> Self {
        Self {
            clock: AtomicU64::new(window + 1024),
            entries: Box::new([const { AtomicU64::new(0) }; ENTRIES]),
            window_kib: (window >> 10) as u32,
        }
    }

    /// Records a copy of `len` bytes to `dst`; true if the same block was written lately.
    #[inline]
    pub fn record(&self, dst: usize, len: usize) -> bool {
        let now = (self.clock.fetch_add(len as u64, Relaxed) >> 10) as u32;
        let page = (dst >> 12) as u64;
        let mixed = page.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let entry = &self.entries[(mixed >> 53) as usize % ENTRIES];
        let tag = (mixed >> 16) as u32;
        let old = entry.load(Relaxed);
        entry.store(u64::from(tag) << 32 | u64::from(now), Relaxed);
        (old >> 32) as u32 == tag && now.wrapping_sub(old as u32) < self.window_kib
    }
}

/// The share of the last-level cache of one copying thread, bytes.
pub(super) fn cache_window() -> u64 {
    let size = (0..8)
        .filter_map(|i| {
            let dir = format!("/sys/devices/system/cpu/cpu0/cache/index{i}");
            let text = std::fs::read_to_string(format!("{dir}/size")).ok()?;
            text.trim().strip_suffix('K')?.parse::<u64>().ok().map(|k| k << 10)
        })
        .max()
        .unwrap_or(8 << 20);
    (size / 4).clamp(1 << 20, 16 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_block_again_is_hot_and_a_long_walk_is_cold() {
        let recent_writes = RecentWrites::new(8 << 20);
        let at = |i: usize| 0x7f00_0000_0000 + i * 65536;
        assert!(!recent_writes.record(at(0), 65536));
        assert!(recent_writes.record(at(0), 65536));
        for i in 1..4096 {
            assert!(!recent_writes.record(at(i), 65536));
        }
        assert!(!recent_writes.record(at(0), 65536));
    }
}
