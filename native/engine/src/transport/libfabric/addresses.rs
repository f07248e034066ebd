//! The peers' addresses that the library knows: one entry for each, however many links and
//! handshakes use it, and gone when nothing does any more.

use fabric_sys::libfabric::FiAddr;
use slab::Slab;

use super::{ops::Table, raw::Nic};
use crate::domain::DomainError;

struct Address {
    bytes: Vec<u8>,
    addr: FiAddr,
    users: u32,
}

#[derive(Default)]
pub(super) struct Addresses {
    all: Slab<Address>,
    /// Some may have no user left.
    dirty: bool,
}

impl Addresses {
    /// The place of an address, with one more user.
    pub fn hold(&mut self, nic: &Nic, bytes: &[u8]) -> Result<usize, DomainError> {
        if let Some((i, a)) = self.all.iter_mut().find(|(_, a)| a.bytes == bytes) {
            a.users += 1;
            return Ok(i);
        }
        let addr = nic.insert(bytes)?;
        Ok(self.all.insert(Address { bytes: bytes.to_vec(), addr, users: 1 }))
    }

    /// One more user of a known one.
    pub fn hold_again(&mut self, i: usize) {
        self.all[i].users += 1;
    }

    pub fn addr(&self, i: usize) -> FiAddr {
        self.all[i].addr
    }

    pub fn release(&mut self, i: usize) {
        self.all[i].users -= 1;
        self.dirty |= self.all[i].users == 0;
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
            match table.uses_address(i) {
                true => self.dirty = true,
                false => nic.remove(self.all.remove(i).addr),
            }
        }
    }
}
