//! libgdrapi (GDRCopy): GPU memory mapped for the CPU.

use std::ffi::{c_int, c_ulong, c_void};

use crate::{Library, OpenError};

pub const NAMES: &[&str] = &["libgdrapi.so.2"];

/// GPU page size; pinned ranges are multiples of it.
pub const PAGE: usize = 64 << 10;

pub type Gdr = *mut c_void;

/// Pinned GPU memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Handle {
    pub h: c_ulong,
}

#[derive(Clone, Copy, Debug)]
pub struct Gdrapi {
    /// Null if the driver (gdrdrv) is not loaded.
    pub open: unsafe extern "C" fn() -> Gdr,
    pub close: unsafe extern "C" fn(Gdr) -> c_int,
    pub pin: unsafe extern "C" fn(Gdr, c_ulong, usize, u64, u32, *mut Handle) -> c_int,
    pub unpin: unsafe extern "C" fn(Gdr, Handle) -> c_int,
    pub map: unsafe extern "C" fn(Gdr, Handle, *mut *mut c_void, usize) -> c_int,
    pub unmap: unsafe extern "C" fn(Gdr, Handle, *mut c_void, usize) -> c_int,
}

impl Gdrapi {
    pub fn load(library: &Library) -> Result<Self, OpenError> {
        // SAFETY: these are the declarations of gdrapi.h.
        unsafe {
            Ok(Self {
                open: library.get("gdr_open")?,
                close: library.get("gdr_close")?,
                pin: library.get("gdr_pin_buffer")?,
                unpin: library.get("gdr_unpin_buffer")?,
                map: library.get("gdr_map")?,
                unmap: library.get("gdr_unmap")?,
            })
        }
    }
}
