//! libcuda: the driver functions that move memory between CPUs, GPUs and processes.
//!
//! Names end in `_v2` where the C header maps the plain name to that symbol.

use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::{Library, OpenError};

/// Sonames, the installed driver's first.
pub const NAMES: &[&str] = &["libcuda.so.1"];

pub type Result = c_int;
pub type Device = c_int;
pub type Context = *mut c_void;
pub type Stream = *mut c_void;
pub type Event = *mut c_void;
pub type DevicePtr = u64;

pub const SUCCESS: Result = 0;
pub const ERROR_INVALID_VALUE: Result = 1;
pub const ERROR_OUT_OF_MEMORY: Result = 2;
pub const ERROR_NOT_INITIALIZED: Result = 3;
pub const ERROR_NO_DEVICE: Result = 100;
pub const ERROR_NOT_READY: Result = 600;
pub const ERROR_PEER_ACCESS_ALREADY_ENABLED: Result = 704;
pub const ERROR_HOST_MEMORY_ALREADY_REGISTERED: Result = 712;
pub const ERROR_NOT_PERMITTED: Result = 800;
pub const ERROR_NOT_SUPPORTED: Result = 801;

/// Attributes of `cuPointerGetAttributes`.
pub mod pointer {
    use super::c_int;

    pub const MEMORY_TYPE: c_int = 2;
    pub const SYNC_MEMOPS: c_int = 6;
    pub const BUFFER_ID: c_int = 7;
    pub const IS_MANAGED: c_int = 8;
    pub const DEVICE_ORDINAL: c_int = 9;
    pub const IS_LEGACY_CUDA_IPC_CAPABLE: c_int = 10;
    pub const RANGE_START_ADDR: c_int = 11;
    pub const RANGE_SIZE: c_int = 12;
    pub const MEMPOOL_HANDLE: c_int = 17;
}

pub const MEMORYTYPE_HOST: c_uint = 1;
pub const MEMORYTYPE_DEVICE: c_uint = 2;
/// An address that tells by itself where it is: of a device, or of host memory that the driver knows.
pub const MEMORYTYPE_UNIFIED: c_uint = 4;

pub const DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED: c_int = 116;
pub const DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS: c_int = 117;
pub const DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING: c_int = 118;
pub const DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED: c_int = 124;
/// CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST
pub const FLUSH_OPTION_HOST: c_int = 1;
/// CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER: the device itself sees them in order.
pub const WRITES_ORDERING_OWNER: c_int = 100;

pub const STREAM_NON_BLOCKING: c_uint = 1;
/// CU_STREAM_CAPTURE_MODE_RELAXED: this thread's calls neither end captures of others nor are
/// refused.
pub const CAPTURE_MODE_RELAXED: c_int = 2;
pub const EVENT_BLOCKING_SYNC: c_uint = 1;
pub const EVENT_DISABLE_TIMING: c_uint = 2;
pub const MEMHOSTREGISTER_PORTABLE: c_uint = 1;
pub const MEMHOSTALLOC_PORTABLE: c_uint = 1;
pub const MEMHOSTALLOC_DEVICEMAP: c_uint = 2;
pub const IPC_MEM_LAZY_ENABLE_PEER_ACCESS: c_uint = 1;
pub const MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD: c_int = 1;
pub const FLUSH_TARGET_CURRENT_CTX: c_int = 0;
pub const FLUSH_TO_OWNER: c_int = 100;

/// Identifies an allocation of one process to another.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpcMemHandle(pub [u8; 64]);

/// `CUDA_MEMCPY2D`: rows at constant distances.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CopyRows {
    pub from_x: usize,
    pub from_y: usize,
    pub from_type: c_uint,
    pub from_host: *const c_void,
    pub from_device: DevicePtr,
    pub from_array: *mut c_void,
    pub from_pitch: usize,
    pub to_x: usize,
    pub to_y: usize,
    pub to_type: c_uint,
    pub to_host: *mut c_void,
    pub to_device: DevicePtr,
    pub to_array: *mut c_void,
    pub to_pitch: usize,
    pub width: usize,
    pub height: usize,
}

/// The driver's functions. All are thread-safe; those marked so use the thread's current context.
#[derive(Clone, Copy, Debug)]
pub struct Cuda {
    pub init: unsafe extern "C" fn(flags: c_uint) -> Result,
    pub driver_version: unsafe extern "C" fn(*mut c_int) -> Result,
    pub get_error_name: unsafe extern "C" fn(Result, *mut *const c_char) -> Result,
    pub get_error_string: unsafe extern "C" fn(Result, *mut *const c_char) -> Result,
    pub device_count: unsafe extern "C" fn(*mut c_int) -> Result,
    pub device_get: unsafe extern "C" fn(*mut Device, ordinal: c_int) -> Result,
    pub device_name: unsafe extern "C" fn(*mut c_char, c_int, Device) -> Result,
    pub device_uuid: unsafe extern "C" fn(*mut [u8; 16], Device) -> Result,
    pub device_pci: unsafe extern "C" fn(*mut c_char, c_int, Device) -> Result,
    pub device_attribute: unsafe extern "C" fn(*mut c_int, c_int, Device) -> Result,
    pub primary_retain: unsafe extern "C" fn(*mut Context, Device) -> Result,
    pub primary_release: unsafe extern "C" fn(Device) -> Result,
    /// Writes flags, and whether the process has the device's primary context; makes none.
    pub primary_state: unsafe extern "C" fn(Device, *mut c_uint, *mut c_int) -> Result,
    pub context_push: unsafe extern "C" fn(Context) -> Result,
    pub context_pop: unsafe extern "C" fn(*mut Context) -> Result,
    /// Current context: it accesses the memory of the given one from then on.
    pub enable_peer_access: unsafe extern "C" fn(Context, flags: c_uint) -> Result,
    pub pointer_attributes:
        unsafe extern "C" fn(c_uint, *const c_int, *const *mut c_void, DevicePtr) -> Result,
    pub pointer_set_attribute: unsafe extern "C" fn(*const c_void, c_int, DevicePtr) -> Result,
    pub address_range: unsafe extern "C" fn(*mut DevicePtr, *mut usize, DevicePtr) -> Result,
    /// From CUDA 11.7 on.
    pub handle_for_range:
        Option<unsafe extern "C" fn(*mut c_void, DevicePtr, usize, c_int, u64) -> Result>,
    /// From CUDA 11.3 on; current context.
    pub flush_rdma_writes: Option<unsafe extern "C" fn(c_int, c_int) -> Result>,
    pub ipc_get: unsafe extern "C" fn(*mut IpcMemHandle, DevicePtr) -> Result,
    /// Current context.
    pub ipc_open: unsafe extern "C" fn(*mut DevicePtr, IpcMemHandle, c_uint) -> Result,
    pub ipc_close: unsafe extern "C" fn(DevicePtr) -> Result,
    /// Current context.
    pub mem_alloc: unsafe extern "C" fn(*mut DevicePtr, usize) -> Result,
    pub mem_free: unsafe extern "C" fn(DevicePtr) -> Result,
    /// Current context.
    pub host_alloc: unsafe extern "C" fn(*mut *mut c_void, usize, c_uint) -> Result,
    pub host_free: unsafe extern "C" fn(*mut c_void) -> Result,
    /// Current context.
    pub host_register: unsafe extern "C" fn(*mut c_void, usize, c_uint) -> Result,
    pub host_unregister: unsafe extern "C" fn(*mut c_void) -> Result,
    pub host_device_pointer: unsafe extern "C" fn(*mut DevicePtr, *mut c_void, c_uint) -> Result,
    pub copy_async: unsafe extern "C" fn(DevicePtr, DevicePtr, usize, Stream) -> Result,
    pub copy_rows_async: unsafe extern "C" fn(*const CopyRows, Stream) -> Result,
    /// Current context.
    pub stream_create: unsafe extern "C" fn(*mut Stream, c_uint) -> Result,
    pub stream_synchronize: unsafe extern "C" fn(Stream) -> Result,
    pub stream_destroy: unsafe extern "C" fn(Stream) -> Result,
    /// Of this thread; writes the previous mode.
    pub exchange_capture_mode: unsafe extern "C" fn(*mut c_int) -> Result,
    /// Current context.
    pub event_create: unsafe extern "C" fn(*mut Event, c_uint) -> Result,
    pub event_record: unsafe extern "C" fn(Event, Stream) -> Result,
    pub event_query: unsafe extern "C" fn(Event) -> Result,
    pub event_synchronize: unsafe extern "C" fn(Event) -> Result,
    pub event_destroy: unsafe extern "C" fn(Event) -> Result,
}

impl Cuda {
    pub fn load(library: &Library) -> std::result::Result<Self, OpenError> {
        // SAFETY: these are the declarations of cuda.h, for the symbols that it maps names to.
        unsafe {
            Ok(Self {
                init: library.get("cuInit")?,
                driver_version: library.get("cuDriverGetVersion")?,
                get_error_name: library.get("cuGetErrorName")?,
                get_error_string: library.get("cuGetErrorString")?,
                device_count: library.get("cuDeviceGetCount")?,
                device_get: library.get("cuDeviceGet")?,
                device_name: library.get("cuDeviceGetName")?,
                // Before 11.4 there was one form only.
                device_uuid: match library.get_optional("cuDeviceGetUuid_v2") {
                    Some(found) => found,
                    None => library.get("cuDeviceGetUuid")?,
                },
                device_pci: library.get("cuDeviceGetPCIBusId")?,
                device_attribute: library.get("cuDeviceGetAttribute")?,
                primary_retain: library.get("cuDevicePrimaryCtxRetain")?,
                primary_release: library.get("cuDevicePrimaryCtxRelease_v2")?,
                primary_state: library.get("cuDevicePrimaryCtxGetState")?,
                context_push: library.get("cuCtxPushCurrent_v2")?,
                context_pop: library.get("cuCtxPopCurrent_v2")?,
                enable_peer_access: library.get("cuCtxEnablePeerAccess")?,
                pointer_attributes: library.get("cuPointerGetAttributes")?,
                pointer_set_attribute: library.get("cuPointerSetAttribute")?,
                address_range: library.get("cuMemGetAddressRange_v2")?,
                handle_for_range: library.get_optional("cuMemGetHandleForAddressRange"),
                flush_rdma_writes: library.get_optional("cuFlushGPUDirectRDMAWrites"),
                ipc_get: library.get("cuIpcGetMemHandle")?,
                ipc_open: library.get("cuIpcOpenMemHandle_v2")?,
                ipc_close: library.get("cuIpcCloseMemHandle")?,
                mem_alloc: library.get("cuMemAlloc_v2")?,
                mem_free: library.get("cuMemFree_v2")?,
                host_alloc: library.get("cuMemHostAlloc")?,
                host_free: library.get("cuMemFreeHost")?,
                host_register: library.get("cuMemHostRegister_v2")?,
                host_unregister: library.get("cuMemHostUnregister")?,
                host_device_pointer: library.get("cuMemHostGetDevicePointer_v2")?,
                copy_async: library.get("cuMemcpyAsync")?,
                copy_rows_async: library.get("cuMemcpy2DAsync_v2")?,
                stream_create: library.get("cuStreamCreate")?,
                stream_synchronize: library.get("cuStreamSynchronize")?,
                stream_destroy: library.get("cuStreamDestroy_v2")?,
                exchange_capture_mode: library.get("cuThreadExchangeStreamCaptureMode")?,
                event_create: library.get("cuEventCreate")?,
                event_record: library.get("cuEventRecord")?,
                event_query: library.get("cuEventQuery")?,
                event_synchronize: library.get("cuEventSynchronize")?,
                event_destroy: library.get("cuEventDestroy_v2")?,
            })
        }
    }
}
