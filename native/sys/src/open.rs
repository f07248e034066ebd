//! Opens a library and looks up its symbols.

use std::{
    fmt,
    sync::{Mutex, PoisonError},
};

use crate::{keep_signals, PerProcess};

/// Why a library, or a symbol in it, can't be used.
#[derive(Debug, Clone)]
pub struct OpenError {
    /// The names that were tried, or the symbol.
    pub what: String,
    /// The loader's message.
    pub why: String,
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} can't be used: {}", self.what, self.why)
    }
}

impl std::error::Error for OpenError {}

/// Keeps a library open forever, in a static, so that leak checkers don't report it.
fn kept(library: libloading::Library) -> &'static libloading::Library {
    static OPENED: PerProcess<Mutex<Vec<&'static libloading::Library>>> = PerProcess::empty();
    let library: &'static libloading::Library = Box::leak(Box::new(library));
    OPENED.get_or_default().lock().unwrap_or_else(PoisonError::into_inner).push(library);
    library
}

/// An open library. It stays open as long as the process, so its symbols stay valid.
#[derive(Debug, Clone, Copy)]
pub struct Library {
    name: &'static str,
    inner: &'static libloading::Library,
}

impl Library {
    /// Opens the first of `names` (sonames or paths) that the loader finds.
    pub fn open(names: &[&'static str]) -> Result<Self, OpenError> {
        let mut why = String::from("no name to try");
        for &name in names {
            // SAFETY: these are system libraries whose initialisers have no preconditions.
            match keep_signals(|| unsafe { libloading::Library::new(name) }) {
                Ok(library) => return Ok(Self { name, inner: kept(library) }),
                Err(error) => why = error.to_string(),
            }
        }
        Err(OpenError { what: names.join(" or "), why })
    }

    /// Finds the first of `names` that this process has loaded already; loads nothing.
    #[must_use]
    pub fn loaded(names: &[&'static str]) -> Option<Self> {
        use libloading::os::unix::{Library as Unix, RTLD_LAZY};
        names.iter().find_map(|&name| {
            // SAFETY: without loading, no initialiser runs.
            let found = unsafe { Unix::open(Some(name), RTLD_LAZY | libc::RTLD_NOLOAD) }.ok()?;
            Some(Self { name, inner: kept(found.into()) })
        })
    }

    /// The name under which it was found.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The symbol `symbol` as a `T`.
    ///
    /// # Safety
    /// `T` must be the function pointer type (or pointer to the data type) that the library's
    /// header declares for the symbol.
    pub unsafe fn get<T: Copy>(&self, symbol: &str) -> Result<T, OpenError> {
        // SAFETY: `T` is right by this function's contract; the library is never closed.
        match unsafe { self.inner.get::<T>(symbol.as_bytes()) } {
            Ok(found) => Ok(*found),
            Err(error) => Err(OpenError {
                what: format!("{symbol} of {}", self.name),
                why: error.to_string(),
            }),
        }
    }

    /// The symbol, or `None` if this version of the library lacks it.
    ///
    /// # Safety
    /// As for [`Library::get`].
    pub unsafe fn get_optional<T: Copy>(&self, symbol: &str) -> Option<T> {
        // SAFETY: by this function's contract.
        unsafe { self.get(symbol) }.ok()
    }
}
