//! Turns work requests into requests of the NIC.

use fabric_sys::ibverbs as sys;

use super::{chain::Wr, ledger::Unflushed, link::Link, regions::Regions};
use crate::{
    api::{Imm, RegionKey},
    domain::{Count, Data, DomainError, Post, Token},
    transport::nic::files::refuse_files,
};

/// Bytes of uncounted writes after which a flush read is posted without waiting for more, so that
/// the spray policy sees progress. One read per so many bytes takes 1% of the wire.
const FLUSH: u64 = 256 << 10;

/// Mask of a NIC's key in a descriptor. It derives from the region's random key, so that neither
/// key alone opens the region (MR-2).
#[inline]
pub(super) fn mask(region: RegionKey) -> u32 {
    (region.rkey as u32) ^ (region.rkey >> 32) as u32
}

/// One contiguous request.
#[derive(Clone, Copy)]
struct Chunk {
    local: sys::Sge,
    /// Address of the local bytes in this process; `local` has the NIC's address.
    address: u64,
    remote: u64,
    rkey: u32,
}

impl Chunk {
    /// Remote address of the last byte. The peer's descriptor names the first one, and may name any.
    fn last(&self) -> u64 {
        self.remote.wrapping_add(u64::from(self.local.length) - 1)
    }
}

/// Cuts the pages of `data` at the ends of registrations and at the longest message.
fn cut(
    data: &Data,
    rail: u8,
    regions: &Regions,
    longest: u64,
    mut each: impl FnMut(Chunk) -> Result<(), DomainError>,
) -> Result<(), DomainError> {
    let unmask = mask(data.remote);
    for page in 0..data.pages {
        let mut local = data.local.0 as u64 + data.local_seq.nth(page);
        let mut offset = data.remote_seq.nth(page);
        let mut left = data.page_len;
        while left > 0 {
            let Some((key, next)) = data.remote_keys.find(rail, offset) else {
                refuse_files(data)?;
                return Err(DomainError::Refused(format!(
                    "the region's descriptor has no key for the peer's NIC {rail}: it was made \
                     before that NIC was opened, or for another engine"
                )));
            };
            let (lkey, addr, local_left) = regions.local(data.local_region, local)?;
            let n = left.min(next - offset).min(local_left).min(longest);
            each(Chunk {
                local: sys::Sge { addr, length: n as u32, lkey },
                address: local,
                remote: key.base.wrapping_add(offset - key.offset),
                rkey: key.key as u32 ^ unmask,
            })?;
            (local, offset, left) = (local + n, offset + n, left - n);
        }
    }
    Ok(())
}

impl Link {
    /// The number of requests that `data` takes; an error above `most`.
    fn requests(
        data: &Data,
        rail: u8,
        (regions, longest): (&Regions, u64),
        most: u32,
    ) -> Result<u32, DomainError> {
        let mut n = 0;
        let counted = cut(data, rail, regions, longest, |_| {
            n += 1;
            if n <= most {
                return Ok(());
            }
            Err(DomainError::Refused(format!(
                "the write is in more than {most} pieces: the peer's descriptor cuts it too finely"
            )))
        });
        counted.map(|()| n)
    }

    /// Enters a work request whose requests are posted.
    fn enter(&mut self, token: Token, data: &Data, first: u32) {
        let offsets = (0..data.pages).map(|i| data.remote_seq.nth(i));
        let ends = |(from, to): (u64, u64), o: u64| (from.min(o), to.max(o + data.page_len));
        let (from, to) = offsets.fold((u64::MAX, 0), ends);
        self.ledger.enter(token, first, (data.remote, from, to));
    }

    /// Posts pages, then their count. The peer's NIC processes them in order, and delivers an
    /// immediate after the bytes before it (IC-2). A write without a count completes after a read,
    /// see [`Unflushed`].
    pub fn write(
        &mut self,
        token: Token,
        data: &Data,
        count: Option<Count>,
        (regions, longest): (&Regions, u64),
    ) -> Result<Post, DomainError> {
        let rail = self.endpoint as u8;
        let imms = count.map_or(0, |c| Imm::weighted(c.imm, c.n).count() as u32);
        let writes = Self::requests(data, rail, (regions, longest), self.ledger.depth() / 2)?;
        if imms > self.channel.imm_places() {
            return Err(DomainError::Refused("the peer takes too few immediates".into()));
        }
        // A flush read covers writes to one region only: others may lie on another device.
        let other = |u: Unflushed| count.is_some() || u.region != data.remote;
        if self.ledger.unflushed.is_some_and(|u| other(u) || u.bytes >= FLUSH) {
            self.post_flush_read()?;
        }
        if self.ledger.room() < writes + imms || self.channel.imm_room() < imms {
            self.post_flush_read()?;
            return Ok(Post::Full);
        }
        let inline = match regions.is_readable(data.local_region) {
            true => u64::from(self.inline),
            false => 0,
        };
        let mut wire = count.map(|c| Imm::weighted(c.imm, c.n));
        let first = self.ledger.next();
        let mut done = 0;
        let (n, bytes) = self.ledger.unflushed.map_or((0, 0), |u| (u.writes, u.bytes));
        let bytes = bytes + data.bytes();
        let mut end = Unflushed { writes: n + 1, bytes, region: data.remote, addr: 0, rkey: 0 };
        cut(data, rail, regions, longest, |p| {
            done += 1;
            (end.addr, end.rkey) = (p.last(), p.rkey);
            let mut wr = Wr {
                opcode: sys::WR_RDMA_WRITE,
                local: p.local,
                remote: p.remote,
                rkey: p.rkey,
                ..Wr::default()
            };
            if u64::from(p.local.length) <= inline {
                // The library copies inline bytes itself.
                wr.flags |= sys::SEND_INLINE;
                wr.local.addr = p.address;
            }
            if done == writes {
                if let Some(imm) = wire.as_mut().and_then(Iterator::next) {
                    wr.opcode = sys::WR_RDMA_WRITE_WITH_IMM;
                    wr.imm = imm;
                }
                if imms == 1 {
                    wr.flags |= sys::SEND_SIGNALED;
                }
            }
            self.push(wr).map(drop)
        })?;
        if imms > 1 {
            self.push_imms(wire.into_iter().flatten(), imms - 1)?;
        }
        self.channel.imms_sent(imms);
        self.submit()?;
        self.enter(token, data, first);
        if count.is_none() {
            self.ledger.unflushed = Some(end);
        }
        Ok(Post::Queued)
    }

    /// Posts immediates without bytes; the last one is signalled.
    fn push_imms(&mut self, imms: impl Iterator<Item = u32>, n: u32) -> Result<(), DomainError> {
        for (i, imm) in (1..).zip(imms) {
            let flags = if i == n { sys::SEND_SIGNALED } else { 0 };
            let opcode = sys::WR_RDMA_WRITE_WITH_IMM;
            self.push(Wr { opcode, flags, imm, ..Wr::default() })?;
        }
        Ok(())
    }

    pub fn count(&mut self, token: Token, count: Count) -> Result<Post, DomainError> {
        let n = Imm::weighted(count.imm, count.n).count() as u32;
        if n == 0 {
            return Ok(Post::Done);
        }
        self.post_flush_read()?;
        if self.ledger.room() < n || self.channel.imm_room() < n {
            return Ok(Post::Full);
        }
        let first = self.ledger.next();
        self.push_imms(Imm::weighted(count.imm, count.n), n)?;
        self.channel.imms_sent(n);
        self.submit()?;
        self.ledger.enter(token, first, Default::default());
        Ok(Post::Queued)
    }

    pub fn read(
        &mut self,
        token: Token,
        data: &Data,
        (regions, longest): (&Regions, u64),
    ) -> Result<Post, DomainError> {
        let rail = self.endpoint as u8;
        let reads = Self::requests(data, rail, (regions, longest), self.ledger.depth() / 2)?;
        self.post_flush_read()?;
        if self.ledger.room() < reads {
            return Ok(Post::Full);
        }
        let first = self.ledger.next();
        let mut done = 0;
        cut(data, rail, regions, longest, |p| {
            done += 1;
            let flags = if done == reads { sys::SEND_SIGNALED } else { 0 };
            let (opcode, local) = (sys::WR_RDMA_READ, p.local);
            let wr = Wr { opcode, flags, local, remote: p.remote, rkey: p.rkey, ..Wr::default() };
            self.push(wr).map(drop)
        })?;
        self.submit()?;
        self.enter(token, data, first);
        Ok(Post::Queued)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_may_name_any_address() {
        for (remote, last) in [(4096, 4099), (u64::MAX - 3, u64::MAX), (u64::MAX, 2)] {
            let local = sys::Sge { addr: 0, length: 4, lkey: 0 };
            assert_eq!(Chunk { local, address: 0, remote, rkey: 0 }.last(), last);
        }
    }
}
