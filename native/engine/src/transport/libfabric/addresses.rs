//! The peers' addresses that the library knows: one entry for each, however many links and
//! handshakes use it, and gone when nothing does any more.

use fabric_sys::libfabric::{FiAddr, ADDR_STR};
use slab::Slab;

use super::{ops::Table, raw::Nic};
use crate::domain::DomainError;

struct Address {
    bytes: Vec<u8>,
    addr: FiAddr,
    users: u32,
    /// The library has forgotten it already.
    cut: bool,
}

pub(super) struct Addresses {
    all: Slab<Address>,
    format: u32,
    /// Bytes of an address, where all have as many.
    len: usize,
    /// Some may have no user left.
    dirty: bool,
}

impl Addresses {
    pub fn new(format: u32, len: usize) -> Self {
        Self { all: Slab::new(), format, len, dirty: false }
    }

    /// What the library reads of an address. Whatever a stranger adds to one that is known must not
    /// make another of it: the library would forget both with either.
    fn proper<'a>(&self, bytes: &'a [u8]) -> Result<&'a [u8], DomainError> {
        if self.format == ADDR_STR {
            let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
            return Ok(&bytes[..end]);
        }
        match bytes.len() == self.len {
            true => Ok(bytes),
            false => Err(DomainError::Handshake(format!(
                "a libfabric address of {} bytes, where this NIC's have {}",
                bytes.len(),
                self.len
            ))),
        }
    }

    /// The place of an address, with one more user.
    pub fn hold(&mut self, nic: &Nic, bytes: &[u8]) -> Result<usize, DomainError> {
        let bytes = self.proper(bytes)?;
        if let Some(i) = self.known(|a| a.bytes == bytes) {
            return Ok(i);
        }
        let addr = nic.insert(bytes)?;
        // Other bytes, and the same to the library.
        if let Some(i) = self.known(|a| a.addr == addr) {
            return Ok(i);
        }
        Ok(self.all.insert(Address { bytes: bytes.to_vec(), addr, users: 1, cut: false }))
    }

    fn known(&mut self, is: impl Fn(&Address) -> bool) -> Option<usize> {
        let (i, a) = self.all.iter_mut().find(|(_, a)| !a.cut && is(a))?;
        a.users += 1;
        Some(i)
    }

    /// One more user of a known one.
    pub fn hold_again(&mut self, i: usize) {
        self.all[i].users += 1;
    }

    pub fn addr(&self, i: usize) -> FiAddr {
        self.all[i].addr
    }

    /// Whether two places are of one peer's address, used before and after it was lost.
    pub fn same(&self, i: usize, j: usize) -> bool {
        let bytes = |i| self.all.get(i).map(|a| &a.bytes);
        i == j || bytes(i) == bytes(j)
    }

    pub fn release(&mut self, i: usize) {
        self.all[i].users -= 1;
        self.dirty |= self.all[i].users == 0;
    }

    /// Has the library forget an address that nobody uses, so that it ends what is under way there,
    /// where it does that.
    pub fn cut(&mut self, i: usize, nic: &Nic, table: &Table) {
        let Some(a) = self.all.get_mut(i).filter(|a| a.users == 0 && !a.cut) else { return };
        if nic.cuts_off() && table.uses_address(i) {
            a.cut = true;
            nic.remove(a.addr);
        }
    }

    /// Forgets those that nobody uses, once nothing is under way to them either: what a provider
    /// does with operations towards an address that is gone differs.
    pub fn sweep(&mut self, nic: &Nic, table: &Table) {
        if !self.dirty {
            return;
        }
        self.dirty = false;
        let unused: Vec<usize> =
            self.all.iter().filter(|(_, a)| a.users == 0).map(|(i, _)| i).collect();
        for i in unused {
            if table.uses_address(i) {
                self.dirty = true;
                if table.touches_memory(i) {
                    self.cut(i, nic, table);
                }
                continue;
            }
            let gone = self.all.remove(i);
            if !gone.cut {
                nic.remove(gone.addr);
            }
        }
    }
}
