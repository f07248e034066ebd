//! The peer addresses in the library's address vector: one entry per address, shared by links and
//! handshakes, removed when unused where the provider allows it.

use fabric_sys::libfabric::{FiAddr, ADDR_STR};
use slab::Slab;

use super::{ops::ContextTable, raw::Nic};
use crate::domain::DomainError;

struct Address {
    bytes: Vec<u8>,
    addr: FiAddr,
    users: u32,
    /// Whether it was removed from the address vector.
    removed: bool,
}

pub(super) struct AddressVector {
    all: Slab<Address>,
    format: u32,
    /// Length of an address, where all have the same.
    len: usize,
    /// Whether an entry may have no user left.
    dirty: bool,
}

impl AddressVector {
    pub fn new(format: u32, len: usize) -> Self {
        Self { all: Slab::new(), format, len, dirty: false }
    }

    /// The bytes of an address that the library reads. A stranger must not be able to append bytes
    /// to a known address and so create a second entry: the library would remove both with either.
    fn canonical<'a>(&self, bytes: &'a [u8]) -> Result<&'a [u8], DomainError> {
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

    /// The index of an address, with one more user.
    pub fn acquire(&mut self, nic: &Nic, bytes: &[u8]) -> Result<usize, DomainError> {
        let bytes = self.canonical(bytes)?;
        if let Some(i) = self.known(|a| a.bytes == bytes) {
            return Ok(i);
        }
        let addr = nic.insert(bytes)?;
        // Different bytes may be the same address to the library.
        if let Some(i) = self.known(|a| a.addr == addr) {
            return Ok(i);
        }
        Ok(self.all.insert(Address { bytes: bytes.to_vec(), addr, users: 1, removed: false }))
    }

    fn known(&mut self, is: impl Fn(&Address) -> bool) -> Option<usize> {
        let (i, a) = self.all.iter_mut().find(|(_, a)| !a.removed && is(a))?;
        a.users += 1;
        Some(i)
    }

    /// Adds a user to an entry.
    pub fn acquire_again(&mut self, i: usize) {
        self.all[i].users += 1;
    }

    pub fn addr(&self, i: usize) -> FiAddr {
        self.all[i].addr
    }

    /// Whether two entries name the same address, before and after a loss.
    pub fn same(&self, i: usize, j: usize) -> bool {
        let bytes = |i| self.all.get(i).map(|a| &a.bytes);
        i == j || bytes(i) == bytes(j)
    }

    pub fn release(&mut self, i: usize) {
        self.all[i].users -= 1;
        self.dirty |= self.all[i].users == 0;
    }

    /// Removes an unused address from the library, so that the provider ends operations towards it,
    /// if it can do that.
    pub fn abort(&mut self, i: usize, nic: &Nic, table: &ContextTable) {
        let Some(a) = self.all.get_mut(i).filter(|a| a.users == 0 && !a.removed) else { return };
        let ends_all = nic.closes_during_reads() || !table.reads_from(i);
        if nic.aborts_on_remove() && ends_all && table.uses_address(i) {
            a.removed = true;
            nic.remove(a.addr);
        }
    }

    /// Removes unused addresses once no operation towards them is under way: providers differ in
    /// what they do with such operations.
    pub fn sweep(&mut self, nic: &Nic, table: &ContextTable) {
        if !self.dirty {
            return;
        }
        self.dirty = false;
        if nic.keeps_addresses() {
            return;
        }
        let unused: Vec<usize> =
            self.all.iter().filter(|(_, a)| a.users == 0).map(|(i, _)| i).collect();
        for i in unused {
            if table.uses_address(i) {
                self.dirty = true;
                if table.touches_memory(i) {
                    self.abort(i, nic, table);
                }
                continue;
            }
            let gone = self.all.remove(i);
            if !gone.removed {
                nic.remove(gone.addr);
            }
        }
    }
}
