//! libfabric: the exported functions, and the tables of functions that its objects carry.
//!
//! Nearly every `fi_*` call of the C headers is an inline function that calls through a table in the
//! object. Tables and structures grow at their end from version to version; only what version 1.14
//! has already is named here, and `fi_info` is always allocated by the library itself. A table's
//! `size` says how far it reaches: see [`has`].

#[cfg(test)]
mod layout;
mod ops;
mod types;

use std::ffi::{c_char, c_int, c_void};

pub use ops::*;
pub use types::*;

use crate::{Library, OpenError};

/// Versions as the library encodes them.
#[must_use]
pub const fn version(major: u32, minor: u32) -> u32 {
    major << 16 | minor
}

/// The functions that the library exports.
#[derive(Debug, Clone, Copy)]
pub struct Libfabric {
    pub version: unsafe extern "C" fn() -> u32,
    pub getinfo: unsafe extern "C" fn(
        version: u32,
        node: *const c_char,
        service: *const c_char,
        flags: u64,
        hints: *const Info,
        info: *mut *mut Info,
    ) -> c_int,
    pub freeinfo: unsafe extern "C" fn(info: *mut Info),
    /// With null: allocates an empty one, with all its attributes.
    pub dupinfo: unsafe extern "C" fn(info: *const Info) -> *mut Info,
    pub fabric: unsafe extern "C" fn(
        attr: *mut FabricAttr,
        fabric: *mut *mut FidFabric,
        context: *mut c_void,
    ) -> c_int,
    pub strerror: unsafe extern "C" fn(errnum: c_int) -> *const c_char,
}

impl Libfabric {
    pub fn load(library: &Library) -> Result<Self, OpenError> {
        // SAFETY: these are the declarations of rdma/fabric.h and rdma/fi_errno.h.
        unsafe {
            Ok(Self {
                version: library.get("fi_version")?,
                getinfo: library.get("fi_getinfo")?,
                freeinfo: library.get("fi_freeinfo")?,
                dupinfo: library.get("fi_dupinfo")?,
                fabric: library.get("fi_fabric")?,
                strerror: library.get("fi_strerror")?,
            })
        }
    }
}
