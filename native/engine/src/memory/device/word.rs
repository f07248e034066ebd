//! A 64-bit word that a GPU and a CPU read and write: for watchers, and for flags on which kernels
//! wait.

use std::sync::atomic::{
    fence, AtomicU64,
    Ordering::{Acquire, Release, SeqCst},
};

use fabric_sys::{
    cuda as sys,
    gdrapi::{self, Gdrapi, PAGE},
    Library,
};

use super::driver::Driver;
use crate::{error::DomainError, EngineError, Result};

/// See the module. With GDRCopy it lies in GPU memory, mapped for the CPU, so that a polling kernel
/// does not use the bus. Otherwise it lies in pinned host memory, mapped for the GPU.
pub struct DeviceWord {
    home: WordMemory,
    driver: &'static Driver,
    device: i32,
    /// Address for the CPU.
    host: usize,
    /// Address for kernels.
    on_device: u64,
}

enum WordMemory {
    Pinned,
    Gdr { table: Gdrapi, gdr: usize, handle: gdrapi::Handle, map: usize, buffer: u64 },
}

impl std::fmt::Debug for DeviceWord {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DeviceWord({} in {})", self.load(), self.home())
    }
}

impl DeviceWord {
    /// A word that is 0, for kernels on `device`.
    ///
    /// # Errors
    /// [`EngineError::Resource`] without a driver or device, saying what is missing.
    pub fn new(device: i32) -> Result<Self> {
        let failed = |e: DomainError| EngineError::Resource {
            call: "watch",
            cause: e.to_string(),
            hint: "a word for kernels needs a GPU that this process may use".into(),
        };
        let driver = Driver::open().map_err(failed)?;
        match Self::by_gdrcopy(driver, device) {
            Ok(word) => return Ok(word),
            Err(why) => tracing::debug!(%why, "no GDRCopy: the word lies in pinned host memory"),
        }
        Self::pinned(driver, device).map_err(failed)
    }

    fn pinned(driver: &'static Driver, device: i32) -> std::result::Result<Self, DomainError> {
        let _current = driver.enter(device)?;
        let (mut host, mut on_device) = (std::ptr::null_mut(), 0);
        let flags = sys::MEMHOSTALLOC_PORTABLE | sys::MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: a context is current; writes the address.
        let rc = unsafe { (driver.table.host_alloc)(&mut host, 64, flags) };
        driver.check("cuMemHostAlloc", rc)?;
        // SAFETY: the memory was just allocated, mapped for the device.
        let rc = unsafe { (driver.table.host_device_pointer)(&mut on_device, host, 0) };
        if let Err(e) = driver.check("cuMemHostGetDevicePointer", rc) {
            // SAFETY: just allocated, and not handed out.
            unsafe { (driver.table.host_free)(host) };
            return Err(e);
        }
        let host = host as usize;
        let word = Self { home: WordMemory::Pinned, driver, device, host, on_device };
        word.store(0);
        Ok(word)
    }

    fn by_gdrcopy(driver: &'static Driver, device: i32) -> std::result::Result<Self, DomainError> {
        let missing = |e: fabric_sys::OpenError| DomainError::Unavailable(e.to_string());
        let library = Library::open(gdrapi::NAMES).map_err(missing)?;
        let table = Gdrapi::load(&library).map_err(missing)?;
        let _current = driver.enter(device)?;
        // SAFETY: no preconditions; null if the kernel module is missing.
        let gdr = unsafe { (table.open)() };
        if gdr.is_null() {
            return Err(DomainError::Unavailable("gdr_open failed: load the gdrdrv module".into()));
        }
        let close = |e: DomainError| {
            // SAFETY: opened above, nothing of it is in use.
            unsafe { (table.close)(gdr) };
            e
        };
        let mut buffer = 0;
        // Twice as much, so that a whole GPU page lies in it.
        // SAFETY: a context is current; writes the address.
        let rc = unsafe { (driver.table.mem_alloc)(&mut buffer, 2 * PAGE) };
        driver.check("cuMemAlloc", rc).map_err(close)?;
        let free = |e: DomainError| {
            // SAFETY: just allocated, not pinned yet.
            unsafe { (driver.table.mem_free)(buffer) };
            close(e)
        };
        driver.sync_memops(device, buffer).map_err(free)?;
        let page = buffer.next_multiple_of(PAGE as u64);
        let mut handle = gdrapi::Handle::default();
        // SAFETY: the page lies in the buffer.
        if unsafe { (table.pin)(gdr, page, PAGE, 0, 0, &mut handle) } != 0 {
            return Err(free(DomainError::Unavailable("gdr_pin_buffer failed".into())));
        }
        let mut map = std::ptr::null_mut();
        // SAFETY: the page is pinned; writes the address.
        if unsafe { (table.map)(gdr, handle, &mut map, PAGE) } != 0 {
            // SAFETY: pinned above.
            unsafe { (table.unpin)(gdr, handle) };
            return Err(free(DomainError::Unavailable("gdr_map failed".into())));
        }
        let (gdr, map) = (gdr as usize, map as usize);
        let home = WordMemory::Gdr { table, gdr, handle, map, buffer };
        let word = Self { home, driver, device, host: map, on_device: page };
        word.store(0);
        Ok(word)
    }

    fn word(&self) -> &AtomicU64 {
        // SAFETY: 8 aligned bytes that stay mapped while this lives. Kernels write them at any
        // time, in one piece.
        unsafe { AtomicU64::from_ptr(self.host as *mut u64) }
    }

    pub fn load(&self) -> u64 {
        let value = self.word().load(Acquire);
        self.fence();
        value
    }

    pub fn store(&self, value: u64) {
        self.fence();
        self.word().store(value, Release);
        self.fence();
    }

    /// Orders accesses of GPU memory. GDRCopy maps it write-combining: its stores pass earlier ones
    /// and stay in the CPU's buffers until a fence, its loads pass each other.
    fn fence(&self) {
        if let WordMemory::Gdr { .. } = self.home {
            fence(SeqCst);
        }
    }

    /// Address for kernels.
    pub fn device_addr(&self) -> u64 {
        self.on_device
    }

    /// Address for the CPU.
    pub fn host_addr(&self) -> usize {
        self.host
    }

    /// The kind of memory, as text.
    pub fn home(&self) -> &'static str {
        match self.home {
            WordMemory::Pinned => "pinned host memory",
            WordMemory::Gdr { .. } => "GPU memory, by GDRCopy",
        }
    }
}

impl Drop for DeviceWord {
    fn drop(&mut self) {
        let Ok(_current) = self.driver.enter(self.device) else { return };
        // SAFETY: made in `new`, in the opposite order; no thread reads the word any more.
        unsafe {
            match &self.home {
                WordMemory::Pinned => {
                    (self.driver.table.host_free)(self.host as *mut _);
                }
                WordMemory::Gdr { table, gdr, handle, map, buffer } => {
                    let gdr = *gdr as gdrapi::Gdr;
                    (table.unmap)(gdr, *handle, *map as *mut _, PAGE);
                    (table.unpin)(gdr, *handle);
                    (table.close)(gdr);
                    (self.driver.table.mem_free)(*buffer);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_gpu_a_word_for_kernels_is_refused_in_words() {
        if Driver::open().is_err() {
            let e = DeviceWord::new(0).unwrap_err().to_string();
            assert!(e.contains("needs a GPU"), "{e}");
        }
    }
}
