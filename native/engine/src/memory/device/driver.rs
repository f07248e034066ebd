//! libcuda, opened on first use, with errors as text.
//!
//! The engine never starts CUDA by itself: a process that has started it can't use it after a fork,
//! and pays for a context. So the engine inspects memory only if the process uses CUDA already.

use std::{
    ffi::{c_char, c_int, c_void, CStr},
    os::fd::{FromRawFd, OwnedFd},
    sync::OnceLock,
};

use fabric_sys::{
    count_forks,
    cuda::{self as sys, Cuda, DevicePtr, IpcMemHandle},
    forks, Library,
};

use crate::{error::DomainError, locks::Mutex};

/// An opened and initialised driver.
#[derive(Debug)]
pub(crate) struct Driver {
    pub(super) table: Cuda,
    pub(super) devices: Vec<Device>,
    /// Primary contexts, retained for the life of the process: one for each device, once used.
    contexts: Mutex<Vec<Option<usize>>>,
    /// Pairs of devices for which peer access was asked for.
    peers: Mutex<Vec<(i32, i32)>>,
    /// Forks before it was initialised. In a child of a later one no call works.
    forks: u32,
}

/// A GPU that this process sees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Device {
    pub name: String,
    /// The same in every process, whatever it numbers.
    pub uuid: [u8; 16],
    /// As in sysfs: `0000:3b:00.0`.
    pub pci: String,
    raw: c_int,
}

static DRIVER: OnceLock<Driver> = OnceLock::new();
static OPENING: Mutex<()> = Mutex::new(());

impl Driver {
    /// The driver, if this process has started CUDA already.
    pub fn in_use() -> Option<&'static Self> {
        if let Some(driver) = DRIVER.get() {
            return (driver.forks == forks()).then_some(driver);
        }
        let table = Cuda::load(&Library::loaded(sys::NAMES)?).ok()?;
        let mut count = 0;
        // SAFETY: writes one number; before cuInit it fails and does nothing.
        match unsafe { (table.device_count)(&mut count) } {
            sys::SUCCESS if count > 0 => Self::keep(table).ok(),
            _ => None,
        }
    }

    /// The driver, started if need be.
    pub fn open() -> Result<&'static Self, DomainError> {
        if let Some(driver) = DRIVER.get() {
            if driver.forks == forks() {
                return Ok(driver);
            }
            let why = "CUDA can't be used after a fork: start processes by spawn";
            return Err(DomainError::Unavailable(why.into()));
        }
        let unavailable = |e: fabric_sys::OpenError| {
            DomainError::Unavailable(format!("{e}; it comes with NVIDIA's driver"))
        };
        let library = Library::open(sys::NAMES).map_err(unavailable)?;
        let table = Cuda::load(&library).map_err(unavailable)?;
        // SAFETY: takes a number that must be 0; may be called again.
        let code = fabric_sys::keep_signals(|| unsafe { (table.init)(0) });
        check(&table, "cuInit", code)?;
        Self::keep(table)
    }

    fn keep(table: Cuda) -> Result<&'static Self, DomainError> {
        let _one = OPENING.lock();
        if let Some(driver) = DRIVER.get() {
            return Ok(driver);
        }
        let mut count = 0;
        // SAFETY: writes one number.
        check(&table, "cuDeviceGetCount", unsafe { (table.device_count)(&mut count) })?;
        if count == 0 {
            let why = "CUDA sees no device; look at CUDA_VISIBLE_DEVICES and nvidia-smi";
            return Err(DomainError::Unavailable(why.into()));
        }
        let devices = (0..count).map(|i| Device::of(&table, i)).collect::<Result<Vec<_>, _>>()?;
        let contexts = Mutex::new(vec![None; devices.len()]);
        let (peers, forks) = (Mutex::new(Vec::new()), count_forks());
        Ok(DRIVER.get_or_init(|| Self { table, devices, contexts, peers, forks }))
    }

    pub fn device(&self, ordinal: i32) -> Result<&Device, DomainError> {
        usize::try_from(ordinal).ok().and_then(|i| self.devices.get(i)).ok_or_else(|| {
            DomainError::Unavailable(format!("CUDA has no device {ordinal} in this process"))
        })
    }

    pub fn ordinal_of(&self, uuid: &[u8; 16]) -> Option<i32> {
        self.devices.iter().position(|d| d.uuid == *uuid).map(|i| i as i32)
    }

    /// The first device that this process uses, for memory of devices that it doesn't see. The
    /// first of all would get a context that takes its memory.
    pub fn device_in_use(&self) -> i32 {
        let used = |device: &Device| {
            let (mut flags, mut active) = (0, 0);
            // SAFETY: writes two numbers.
            let rc = unsafe { (self.table.primary_state)(device.raw, &mut flags, &mut active) };
            rc == sys::SUCCESS && active != 0
        };
        self.devices.iter().position(used).unwrap_or(0) as i32
    }

    /// A device's primary context, retained for the life of the process.
    fn context(&self, ordinal: i32) -> Result<sys::Context, DomainError> {
        let device = self.device(ordinal)?;
        let mut contexts = self.contexts.lock();
        if let Some(context) = contexts[ordinal as usize] {
            return Ok(context as *mut _);
        }
        let mut context = std::ptr::null_mut();
        // SAFETY: a device of this driver; retained for good.
        let rc = unsafe { (self.table.primary_retain)(&mut context, device.raw) };
        self.check("cuDevicePrimaryCtxRetain", rc)?;
        contexts[ordinal as usize] = Some(context as usize);
        Ok(context)
    }

    /// Has the copy engine of one device access another's memory directly, where the two have a
    /// path. Without, the driver stages copies between them through host memory.
    pub fn access_peer(&'static self, device: i32, owner: i32) -> Result<(), DomainError> {
        if device == owner || self.peers.lock().contains(&(device, owner)) {
            return Ok(());
        }
        let context = self.context(owner)?;
        let _current = self.enter(device)?;
        // SAFETY: two contexts that stay retained, the other one current.
        let rc = unsafe { (self.table.enable_peer_access)(context, 0) };
        if rc != sys::ERROR_PEER_ACCESS_ALREADY_ENABLED {
            if let Err(error) = self.check("cuCtxEnablePeerAccess", rc) {
                tracing::warn!(%error, "copies between cuda:{device} and cuda:{owner} are slow");
            }
        }
        self.peers.lock().push((device, owner));
        Ok(())
    }

    /// Makes a device's primary context, the one that torch uses too, current on this thread.
    ///
    /// What is called meanwhile has nothing to do with streams that another thread captures into a
    /// graph, and neither breaks that nor is refused because of it.
    pub fn enter(&'static self, ordinal: i32) -> Result<CurrentContext, DomainError> {
        let context = self.context(ordinal)?;
        // SAFETY: a context that stays retained.
        self.check("cuCtxPushCurrent", unsafe { (self.table.context_push)(context) })?;
        let mut mode = sys::CAPTURE_MODE_RELAXED;
        // SAFETY: reads and writes one number.
        let rc = unsafe { (self.table.exchange_capture_mode)(&mut mode) };
        let relaxed = self.check("cuThreadExchangeStreamCaptureMode", rc);
        let mode = relaxed.is_ok().then_some(mode);
        let current = CurrentContext { driver: self, mode, _here: std::marker::PhantomData };
        relaxed.map(|()| current)
    }

    pub fn check(&self, call: &'static str, rc: sys::Result) -> Result<(), DomainError> {
        check(&self.table, call, rc)
    }

    /// Reads attributes of an address; zero for an unknown address.
    pub fn attributes<const N: usize>(
        &self,
        asked: [c_int; N],
        addr: u64,
    ) -> Result<[u64; N], DomainError> {
        let mut values = [0u64; N];
        let mut places = [std::ptr::null_mut::<c_void>(); N];
        for (place, value) in places.iter_mut().zip(&mut values) {
            *place = std::ptr::from_mut(value).cast();
        }
        // SAFETY: as many places as attributes, each of 8 bytes, which none of them exceeds. The
        // address is looked up, not followed.
        let rc = unsafe {
            (self.table.pointer_attributes)(N as u32, asked.as_ptr(), places.as_ptr(), addr)
        };
        self.check("cuPointerGetAttributes", rc)?;
        Ok(values)
    }

    /// Has synchronous CUDA calls on this allocation wait until they are done, as memory that NICs
    /// read and write needs.
    pub fn sync_memops(&'static self, ordinal: i32, addr: u64) -> Result<(), DomainError> {
        let _current = self.enter(ordinal)?;
        let on: u32 = 1;
        // SAFETY: the attribute takes a 32-bit flag.
        let rc = unsafe {
            (self.table.pointer_set_attribute)(
                std::ptr::from_ref(&on).cast(),
                sys::pointer::SYNC_MEMOPS,
                addr,
            )
        };
        self.check("cuPointerSetAttribute", rc)
    }

    pub fn device_attribute(&self, ordinal: i32, attribute: c_int) -> Result<bool, DomainError> {
        Ok(self.device_number(ordinal, attribute)? != 0)
    }

    fn device_number(&self, ordinal: i32, attribute: c_int) -> Result<c_int, DomainError> {
        let device = self.device(ordinal)?;
        let mut value = 0;
        // SAFETY: writes one number.
        let rc = unsafe { (self.table.device_attribute)(&mut value, attribute, device.raw) };
        self.check("cuDeviceGetAttribute", rc)?;
        Ok(value)
    }

    /// Whether what NICs have written to a device must be flushed before it is visible there
    /// (IC-2).
    ///
    /// # Errors
    /// Whether the device needs a flush after RDMA writes and the platform has none: NICs must not
    /// write to this device.
    pub fn needs_flush(&self, ordinal: i32) -> Result<bool, DomainError> {
        let ordering =
            self.device_number(ordinal, sys::DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING)?;
        if ordering >= sys::WRITES_ORDERING_OWNER {
            return Ok(false);
        }
        let options = self
            .device_number(ordinal, sys::DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS)?;
        match self.table.flush_rdma_writes.is_some() && options & sys::FLUSH_OPTION_HOST != 0 {
            true => Ok(true),
            false => Err(DomainError::Unavailable(format!(
                "GPU {ordinal} may see NICs' writes late, and its driver offers no flush: leave the \
                 NIC transports out, and its memory is staged"
            ))),
        }
    }

    /// A dma-buf of device memory; both ends on page boundaries.
    pub fn dmabuf(
        &'static self,
        ordinal: i32,
        addr: u64,
        len: u64,
    ) -> Result<OwnedFd, DomainError> {
        let _current = self.enter(ordinal)?;
        let Some(get) = self.table.handle_for_range else {
            let why = "this CUDA driver is older than 11.7 and exports no dma-buf; update it, or \
                       load the nvidia-peermem module";
            return Err(DomainError::Unavailable(why.into()));
        };
        let mut fd: c_int = -1;
        // SAFETY: the handle of this type is a descriptor, an int.
        let rc = unsafe {
            get(
                std::ptr::from_mut(&mut fd).cast(),
                addr,
                len as usize,
                sys::MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD,
                0,
            )
        };
        self.check("cuMemGetHandleForAddressRange", rc)?;
        // SAFETY: a fresh descriptor that is ours.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// A name for the allocation at `base`, good in other processes of this host.
    pub fn export(&'static self, ordinal: i32, base: u64) -> Result<[u8; 64], DomainError> {
        let _current = self.enter(ordinal)?;
        let mut handle = IpcMemHandle([0; 64]);
        // SAFETY: writes the handle.
        self.check("cuIpcGetMemHandle", unsafe { (self.table.ipc_get)(&mut handle, base) })?;
        Ok(handle.0)
    }

    /// Maps a peer's allocation.
    pub fn import(&'static self, ordinal: i32, handle: [u8; 64]) -> Result<u64, DomainError> {
        let _current = self.enter(ordinal)?;
        let mut base: DevicePtr = 0;
        let flags = sys::IPC_MEM_LAZY_ENABLE_PEER_ACCESS;
        // SAFETY: the driver checks the handle; a context is current.
        let rc = unsafe { (self.table.ipc_open)(&mut base, IpcMemHandle(handle), flags) };
        self.check("cuIpcOpenMemHandle", rc)?;
        Ok(base)
    }

    /// Unmaps what `import` mapped. Nothing may use it any more.
    pub fn forget(&'static self, ordinal: i32, base: u64) -> Result<(), DomainError> {
        let _current = self.enter(ordinal)?;
        // SAFETY: a mapping of `import`.
        self.check("cuIpcCloseMemHandle", unsafe { (self.table.ipc_close)(base) })
    }

    /// Start and bytes of the allocation that contains an address.
    pub fn allocation(&'static self, ordinal: i32, addr: u64) -> Result<(u64, u64), DomainError> {
        let _current = self.enter(ordinal)?;
        let (mut base, mut size) = (0, 0);
        // SAFETY: writes both; the address is looked up, not followed.
        let rc = unsafe { (self.table.address_range)(&mut base, &mut size, addr) };
        self.check("cuMemGetAddressRange", rc)?;
        Ok((base, size as u64))
    }

    /// Pins host memory, so that the copy engine reaches it by itself. False if another part of
    /// this process has pinned it, which then unpins it.
    pub fn pin(&'static self, ordinal: i32, addr: usize, len: usize) -> Result<bool, DomainError> {
        let _current = self.enter(ordinal)?;
        // SAFETY: the driver checks that the range is mapped; the caller unpins before it unmaps.
        let rc = unsafe {
            (self.table.host_register)(addr as *mut _, len, sys::MEMHOSTREGISTER_PORTABLE)
        };
        match rc {
            sys::ERROR_HOST_MEMORY_ALREADY_REGISTERED => Ok(false),
            rc => self.check("cuMemHostRegister", rc).map(|()| true),
        }
    }

    pub fn unpin(&'static self, ordinal: i32, addr: usize) -> Result<(), DomainError> {
        let _current = self.enter(ordinal)?;
        // SAFETY: what `pin` pinned.
        self.check("cuMemHostUnregister", unsafe { (self.table.host_unregister)(addr as *mut _) })
    }

    /// Waits until what NICs have written to a device is visible to it (IC-2 where writes from PCIe
    /// may linger).
    pub fn flush_rdma_writes(&'static self, ordinal: i32) -> Result<(), DomainError> {
        let Some(flush) = self.table.flush_rdma_writes else { return Ok(()) };
        let _current = self.enter(ordinal)?;
        // SAFETY: takes two numbers; a context is current.
        let rc = unsafe { flush(sys::FLUSH_TARGET_CURRENT_CTX, sys::FLUSH_TO_OWNER) };
        self.check("cuFlushGPUDirectRDMAWrites", rc)
    }
}

/// A context is current on this thread for as long as this lives.
pub(crate) struct CurrentContext {
    driver: &'static Driver,
    /// The thread's earlier capture mode; `None` if it was not changed.
    mode: Option<c_int>,
    /// The thread it was made on pops it.
    _here: std::marker::PhantomData<*const ()>,
}

impl Drop for CurrentContext {
    fn drop(&mut self) {
        if let Some(mut mode) = self.mode {
            // SAFETY: reads and writes one number; the mode that `enter` found on this thread.
            unsafe { (self.driver.table.exchange_capture_mode)(&mut mode) };
        }
        let mut context = std::ptr::null_mut();
        // SAFETY: pops what `enter` pushed on this thread.
        unsafe { (self.driver.table.context_pop)(&mut context) };
    }
}

impl Device {
    fn of(table: &Cuda, ordinal: c_int) -> Result<Self, DomainError> {
        let (mut raw, mut uuid) = (0, [0; 16]);
        // SAFETY: writes the device's number.
        check(table, "cuDeviceGet", unsafe { (table.device_get)(&mut raw, ordinal) })?;
        // SAFETY: writes 16 bytes.
        check(table, "cuDeviceGetUuid", unsafe { (table.device_uuid)(&mut uuid, raw) })?;
        let text = |call, get: unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int| {
            let mut bytes = [0u8; 128];
            // SAFETY: writes at most so many bytes, the last of them zero.
            check(table, call, unsafe { get(bytes.as_mut_ptr().cast(), 128, raw) })?;
            let text = CStr::from_bytes_until_nul(&bytes).unwrap_or_default();
            Ok(text.to_string_lossy().into_owned())
        };
        let name = text("cuDeviceGetName", table.device_name)?;
        let pci = text("cuDeviceGetPCIBusId", table.device_pci)?.to_lowercase();
        Ok(Self { name, uuid, pci, raw })
    }
}

fn check(table: &Cuda, call: &'static str, rc: sys::Result) -> Result<(), DomainError> {
    if rc == sys::SUCCESS {
        return Ok(());
    }
    let words = |get: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int| {
        let mut text = std::ptr::null();
        // SAFETY: writes a pointer to a constant of the library, or fails.
        match unsafe { get(rc, &mut text) } {
            // SAFETY: a C string that lives as long as the library, which is never closed.
            sys::SUCCESS if !text.is_null() => unsafe { CStr::from_ptr(text) }.to_string_lossy(),
            _ => "unknown".into(),
        }
    };
    let (name, meaning) = (words(table.get_error_name), words(table.get_error_string));
    let hint = match rc {
        sys::ERROR_OUT_OF_MEMORY => "; free GPU memory, or pinned memory of the host",
        sys::ERROR_NOT_INITIALIZED => "; CUDA can't be used after a fork: start processes by spawn",
        sys::ERROR_NO_DEVICE => "; look at CUDA_VISIBLE_DEVICES and nvidia-smi",
        sys::ERROR_NOT_PERMITTED | sys::ERROR_NOT_SUPPORTED => {
            "; this driver or container doesn't allow it"
        }
        _ => "",
    };
    Err(DomainError::Unavailable(format!("{call}: {name} ({meaning}){hint}")))
}

#[cfg(test)]
#[path = "driver_tests.rs"]
mod tests;
