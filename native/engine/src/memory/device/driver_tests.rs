use std::cell::RefCell;

use super::*;

impl Driver {
    /// A driver that has no devices, so that none can be entered and no other call is made.
    pub fn without_devices() -> &'static Self {
        Self::of_calls(0, |_| {})
    }

    /// A driver of so many devices whose calls other than those that `set` sets must not be made.
    pub fn of_calls(devices: u8, set: impl FnOnce(&mut Cuda)) -> &'static Self {
        extern "C" fn never() {
            unreachable!("a call that this driver doesn't have")
        }
        const CALLS: usize = size_of::<Cuda>() / size_of::<usize>();
        // SAFETY: the table is made of pointers to functions only, and none of them is called
        // unless `set` gives one of its type.
        let mut table = unsafe {
            std::mem::transmute::<[extern "C" fn(); CALLS], Cuda>([never as extern "C" fn(); CALLS])
        };
        set(&mut table);
        let device = |i| Device {
            name: format!("GPU {i}"),
            uuid: [i; 16],
            pci: String::new(),
            raw: c_int::from(i),
        };
        let contexts = Mutex::new(vec![None; usize::from(devices)]);
        let (peers, forks) = (Mutex::new(Vec::new()), count_forks());
        let devices = (0..devices).map(device).collect();
        Box::leak(Box::new(Self { table, devices, contexts, peers, forks }))
    }

    /// A driver of so many devices whose contexts can be entered.
    pub fn of_contexts(devices: u8, set: impl FnOnce(&mut Cuda)) -> &'static Self {
        Self::of_calls(devices, |table| {
            (table.primary_retain, table.context_push, table.context_pop) = (retain, push, pop);
            table.exchange_capture_mode = exchange;
            set(table);
        })
    }
}

#[test]
fn a_machine_without_the_driver_says_so_and_looking_starts_nothing() {
    if std::path::Path::new("/dev/nvidiactl").exists() {
        return;
    }
    assert!(Driver::in_use().is_none());
    let e = Driver::open().map(|_| ()).unwrap_err().to_string();
    assert!(e.contains("libcuda.so.1") || e.contains("cuInit"), "{e}");
    assert!(Driver::in_use().is_none());
}

/// What was called on this thread.
#[derive(Default)]
struct Calls {
    /// Devices whose primary context was retained.
    retained: Vec<c_int>,
    /// Contexts that are current, the last of them in use. A context is 100 more than its device.
    current: Vec<usize>,
    /// The current context and its peer, for each time that access was asked for.
    enabled: Vec<(usize, usize)>,
}

thread_local! {
    static CALLS: RefCell<Calls> = RefCell::default();
}

unsafe extern "C" fn retain(context: *mut sys::Context, device: sys::Device) -> sys::Result {
    CALLS.with_borrow_mut(|calls| calls.retained.push(device));
    // SAFETY: the caller's place.
    unsafe { *context = (100 + device as usize) as *mut _ };
    sys::SUCCESS
}

extern "C" fn push(context: sys::Context) -> sys::Result {
    CALLS.with_borrow_mut(|calls| calls.current.push(context as usize));
    sys::SUCCESS
}

extern "C" fn pop(_: *mut sys::Context) -> sys::Result {
    CALLS.with_borrow_mut(|calls| calls.current.pop());
    sys::SUCCESS
}

extern "C" fn exchange(_: *mut c_int) -> sys::Result {
    sys::SUCCESS
}

extern "C" fn enable(peer: sys::Context, flags: u32) -> sys::Result {
    CALLS.with_borrow_mut(|calls| {
        let access = (calls.current.last().copied().unwrap_or(0), peer as usize);
        calls.enabled.push(access);
        match access {
            (device, owner) if flags != 0 || device == owner => sys::ERROR_INVALID_VALUE,
            // torch has done so for these two.
            (101, 100) => sys::ERROR_PEER_ACCESS_ALREADY_ENABLED,
            _ => sys::SUCCESS,
        }
    })
}

/// The second of three devices is in use.
unsafe extern "C" fn state(device: c_int, _: *mut u32, active: *mut c_int) -> sys::Result {
    // SAFETY: the caller's place.
    unsafe { *active = c_int::from(device == 1) };
    sys::SUCCESS
}

fn of_three() -> &'static Driver {
    Driver::of_contexts(3, |table| {
        (table.enable_peer_access, table.primary_state) = (enable, state);
    })
}

#[test]
fn a_copy_engine_accesses_another_device_directly_and_asks_once() {
    let driver = of_three();
    for (device, owner) in [(0, 1), (0, 1), (1, 0), (2, 2)] {
        driver.access_peer(device, owner).unwrap();
    }
    let calls = CALLS.take();
    assert_eq!(calls.enabled, [(100, 101), (101, 100)]);
    assert!(calls.current.is_empty(), "a context stays current");
    assert_eq!(calls.retained, [1, 0], "a device that isn't used gets a context");
}

#[test]
fn memory_of_devices_that_are_not_seen_is_mapped_where_the_process_has_a_context() {
    assert_eq!(of_three().device_in_use(), 1);
    assert!(CALLS.take().retained.is_empty(), "looking makes a context");
}
