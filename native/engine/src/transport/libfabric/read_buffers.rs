//! Buffers for reads that can't be cut off when their peer is lost: such a read would write to its
//! region after it has failed (MR-1). Its bytes arrive in a buffer instead, and are copied when the
//! read is done. NICs place bytes in the region itself.

use super::raw::Nic;

/// Where the bytes of a chunk arrive.
pub(super) struct ReadBuffer {
    bytes: Vec<u8>,
    /// Address in the local region.
    dst: usize,
}

impl ReadBuffer {
    /// A buffer for `len` bytes that are wanted at `dst`.
    pub fn new(dst: usize, len: u64) -> Self {
        Self { bytes: vec![0; len as usize], dst }
    }

    pub fn addr(&mut self) -> usize {
        self.bytes.as_mut_ptr() as usize
    }

    /// Copies the bytes to the region.
    ///
    /// # Safety
    /// All bytes have arrived, and the region is still registered and allocated.
    pub unsafe fn deliver(self) {
        // SAFETY: the engine has checked the bounds; the buffer is memory of its own.
        unsafe {
            std::ptr::copy_nonoverlapping(
                self.bytes.as_ptr(),
                self.dst as *mut u8,
                self.bytes.len(),
            );
        }
    }
}

impl Nic {
    /// Whether a connection can be closed whatever is under way, which then ends.
    pub fn cuts_off(&self) -> bool {
        self.aborts_on_remove() && self.closes_during_reads()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::{
        teardown::tests::{open, TestMessageRoom},
        LibfabricDomain,
    };
    use crate::{
        api::RegionKey,
        domain::{
            Completion, Data, Domain, DomainError, LinkId, LocalAddr, Post, Seq, Token, WorkRequest,
        },
        memory::{Backing, RegionMemory},
        time::Time,
    };

    /// More than sockets hold.
    const BYTES: usize = 32 << 20;
    const KEY: RegionKey = RegionKey { index: 0, rkey: 7 };

    fn poll(domain: &mut LibfabricDomain) -> Vec<Completion> {
        let mut out = Vec::new();
        domain.poll(Time::now(), &TestMessageRoom, &mut out);
        out
    }

    fn up(out: &[Completion]) -> Option<LinkId> {
        out.iter().find_map(|c| match c {
            Completion::LinkUp { link, .. } => Some(*link),
            _ => None,
        })
    }

    fn failed(out: &[Completion]) -> bool {
        out.iter().any(|c| matches!(c, Completion::Done { result: Err(_), .. }))
    }

    struct Reading {
        a: LibfabricDomain,
        b: LibfabricDomain,
        link: LinkId,
        /// Of each end.
        memory: [Vec<u8>; 2],
    }

    /// Has `a` read from `b`; `None` where the provider is missing.
    fn reading(provider: &str) -> Option<Reading> {
        let skip = |e| eprintln!("skipped: {e}");
        let (mut a, _) = open(1, provider).map_err(skip).ok()?;
        let (mut b, address) = open(2, provider).map_err(skip).ok()?;
        let mut memory = [vec![0; BYTES], vec![7; BYTES]];
        let [to, from] = memory.each_mut().map(|m| m.as_mut_ptr() as usize);
        let region =
            |base| Arc::new(RegionMemory::new(KEY, base, BYTES as u64, Backing::Foreign, None));
        a.register(&region(to), None).unwrap();
        let remote_keys = b.register(&region(from), None).unwrap();
        a.connect(Time::now(), &address, 0).unwrap();
        let link = loop {
            poll(&mut b);
            if let Some(link) = up(&poll(&mut a)) {
                break link;
            }
        };
        let data = Data {
            local: LocalAddr(to),
            local_region: 0,
            local_seq: Seq::at(0),
            remote: KEY,
            remote_keys: remote_keys.into_vec().into(),
            remote_seq: Seq::at(0),
            page_len: BYTES as u64,
            pages: 1,
        };
        let posted = a.post(link, Token::default(), &WorkRequest::Read { data }).unwrap();
        assert_eq!(posted, Post::Queued);
        Some(Reading { a, b, link, memory })
    }

    impl Reading {
        fn poll(&mut self) {
            poll(&mut self.b);
            poll(&mut self.a);
        }

        /// Polls until the first bytes have arrived.
        fn begin(&mut self) {
            let begun = |r: &Self| {
                r.memory[0][0] != 0 || r.a.table.buffers.values().any(|b| b.bytes[0] != 0)
            };
            while !begun(self) {
                self.poll();
            }
            assert!(self.a.table.reads(), "the read is done already");
        }

        /// Ends the link at the reader alone; no byte may land after that.
        fn lands_nothing_when_cut(mut self) {
            self.a.close_link(self.link, DomainError::LinkDown("a test".into()), false);
            let before = self.memory[0].clone();
            assert!(failed(&poll(&mut self.a)));
            for _ in 0..1000 {
                self.poll();
            }
            assert!(self.memory[0] == before, "bytes landed after the read had failed");
        }
    }

    #[test]
    fn mr_1_a_read_that_is_cut_while_bytes_arrive_lands_no_more() {
        let Some(mut reading) = reading("tcp;ofi_rxm") else { return };
        reading.begin();
        reading.lands_nothing_when_cut();
    }

    #[test]
    fn mr_1_a_read_that_the_provider_keeps_lands_nothing() {
        let Some(mut reading) = reading("shm") else { return };
        // The peer is asked before the read is posted.
        while !reading.a.table.reads() {
            reading.poll();
        }
        reading.lands_nothing_when_cut();
    }

    #[test]
    fn rs_4_an_end_closes_while_the_bytes_of_a_read_arrive() {
        let Some(mut reading) = reading("tcp;ofi_rxm") else { return };
        reading.begin();
        // The peer makes no progress, so the read is still under way.
        reading.a.close();
        assert!(failed(&poll(&mut reading.a)));
    }
}
