//! The libfabric library, opened once per process at run time.

use std::{ffi::CStr, sync::OnceLock};

use fabric_sys::{
    libfabric::{version, Libfabric},
    Library,
};

use crate::{domain::DomainError, process::PerProcess};

/// Path of another library than the system's.
const PATH_VAR: &str = "FABRIC_RAY_LIBFABRIC";
/// Has the tcp provider close a peer's connection when its address is removed, so that transfers
/// there end and land nowhere (MR-1). A user's own setting stays.
const CLEANUP_VAR: &str = "FI_AV_REMOVE_CLEANUP";
/// Oldest supported version; older ones lack functions that are called here.
const OLDEST: u32 = version(1, 14);
/// The API version to request. From 1.18 on `efa` uses the device's RDMA for callers that request
/// that version, and 1.20 supports dma-bufs; nothing newer is needed.
const NEWEST: u32 = version(1, 20);
/// The first version whose tcp provider ends a read once if its connection closes meanwhile.
pub(super) const TCP_ENDS_READS_ONCE: u32 = version(1, 18);
/// The first version with `FI_MR_DMABUF`.
const DMABUF: u32 = version(1, 20);

/// The opened library.
#[derive(Clone, Copy, Debug)]
pub(super) struct Api {
    pub fns: Libfabric,
    pub library: &'static str,
    /// Name of the library.
    pub found: u32,
    /// The API version to request.
    pub api: u32,
}

/// The library, or why it is missing.
pub(super) fn get() -> Result<Api, DomainError> {
    static API: PerProcess<OnceLock<Result<Api, String>>> = PerProcess::empty();
    let api = API.get_or_default().get_or_init(|| {
        let path = std::env::var(PATH_VAR).ok().filter(|p| !p.is_empty());
        // Once per process: the path must live as long as the library, which is forever.
        let path: Option<&'static str> = path.map(|p| &*p.leak());
        open(path)
    });
    api.clone().map_err(DomainError::Unavailable)
}

/// Disables registration caches. They keep registrations after their end (MR-1) and reuse them for
/// other memory at the same address (IC-2). Their monitors patch libc functions and miss direct
/// system calls.
const NO_CACHE: [(&str, &str); 2] =
    [("FI_MR_CACHE_MAX_COUNT", "0"), ("FI_EFA_MR_CACHE_ENABLE", "0")];

/// Whether the cleanup setting is in force; the user may have disabled it.
pub(super) fn cleanup_enabled() -> bool {
    static YES: PerProcess<OnceLock<bool>> = PerProcess::empty();
    *YES.get_or_default().get_or_init(|| {
        let set = std::env::var(CLEANUP_VAR).unwrap_or_default().to_lowercase();
        matches!(set.as_str(), "1" | "on" | "true" | "yes")
    })
}

fn open(path: Option<&'static str>) -> Result<Api, String> {
    for (name, value) in NO_CACHE {
        if std::env::var_os(name).is_none() {
            // The library reads the environment at its first call; there is no other interface.
            std::env::set_var(name, value);
        }
    }
    let library = match path {
        Some(path) => Library::open(&[path]).map_err(|e| format!("{e} ({PATH_VAR})"))?,
        None => Library::open(&["libfabric.so.1", "libfabric.so.2"]).map_err(|e| {
            format!("{e}; install libfabric (libfabric1), or name it by {PATH_VAR}=/path/to/it")
        })?,
    };
    if std::env::var_os(CLEANUP_VAR).is_none() {
        // Before the library's first call, which reads it.
        std::env::set_var(CLEANUP_VAR, "1");
    }
    let fns = Libfabric::load(&library).map_err(|e| e.to_string())?;
    // SAFETY: it takes no arguments and returns a number.
    let found = unsafe { (fns.version)() };
    if found < OLDEST {
        return Err(format!(
            "{} is version {}, older than {}: install a newer libfabric",
            library.name(),
            dotted(found),
            dotted(OLDEST)
        ));
    }
    Ok(Api { fns, library: library.name(), found, api: found.min(NEWEST) })
}

impl Api {
    /// The library's text for an error code, negative or not.
    pub fn strerror(&self, code: i64) -> String {
        let code = code.unsigned_abs().min(i32::MAX as u64) as i32;
        // SAFETY: it returns null, or a string that lives as long as the library.
        unsafe {
            let text = (self.fns.strerror)(code);
            match text.is_null() {
                true => format!("error {code}"),
                false => CStr::from_ptr(text).to_string_lossy().into_owned(),
            }
        }
    }

    /// Whether registrations can use a dma-buf.
    pub fn supports_dmabuf(&self) -> bool {
        self.api >= DMABUF
    }

    pub fn fail(&self, call: &str, code: i64) -> DomainError {
        DomainError::Unavailable(format!("{call}: {}", self.strerror(code)))
    }
}

pub(super) fn dotted(version: u32) -> String {
    format!("{}.{}", version >> 16, version & 0xFFFF)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_explained() {
        let why = open(Some("/nowhere/libfabric.so.1")).unwrap_err();
        assert!(why.contains("/nowhere/libfabric.so.1") && why.contains(PATH_VAR), "{why}");
        // A library that is not libfabric.
        let why = open(Some("libc.so.6")).unwrap_err();
        assert!(why.contains("fi_version"), "{why}");
    }
}
