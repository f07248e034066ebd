//! The NUMA node of memory.

/// `get_mempolicy` flags: return the node of an address.
const NODE_OF_ADDRESS: libc::c_ulong = 1 | 2;

/// The node of the page at `addr`; `None` if unknown. The query allocates an untouched page.
pub(crate) fn node_of(addr: usize) -> Option<u16> {
    let mut node: libc::c_int = -1;
    // SAFETY: writes the node and reads nothing; the kernel checks the address.
    let rc = unsafe {
        libc::syscall(
            libc::SYS_get_mempolicy,
            &mut node,
            std::ptr::null_mut::<libc::c_ulong>(),
            0 as libc::c_ulong,
            addr,
            NODE_OF_ADDRESS,
        )
    };
    u16::try_from(node).ok().filter(|_| rc == 0)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn memory_lies_on_a_node_of_this_machine_or_an_unknown_one() {
        let word = 7u64;
        if let Some(node) = node_of(std::ptr::from_ref(&word) as usize) {
            let path = format!("/sys/devices/system/node/node{node}");
            let sysfs = std::path::Path::new("/sys/devices/system/node").exists();
            assert!(!sysfs || std::path::Path::new(&path).exists(), "{path}");
        }
        assert_eq!(node_of(0), None);
    }
}
