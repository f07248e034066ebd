//! libfabric: its exported functions, and the function tables of its objects.
//!
//! Most `fi_*` calls of the C headers are inline functions that call through an object's table.
//! Tables and structures grow at their end between versions. Only fields of version 1.14 are
//! declared here, and the library itself allocates `fi_info`. A table's `size` gives its extent:
//! see [`has`].

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
