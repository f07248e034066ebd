//! The memory that the system can still give. Shared memory is charged page by page, so too large
//! an allocation does not fail but starts the out-of-memory killer.

use std::{fs, path::Path};

/// Bytes that are available to this machine and this container; `u64::MAX` if unknown.
pub(super) fn headroom() -> u64 {
    let machine = fs::read_to_string("/proc/meminfo").ok().and_then(|s| machine(&s));
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let containers = own.lines().filter_map(container);
    machine.into_iter().chain(containers).min().unwrap_or(u64::MAX)
}

fn machine(meminfo: &str) -> Option<u64> {
    let kib = |name| field(meminfo, name);
    Some((kib("MemAvailable:")? + kib("SwapFree:").unwrap_or(0)) << 10)
}

/// The bytes by one line of `/proc/self/cgroup`: `0::/path` (version 2), or `4:memory:/path`
/// (version 1).
fn container(line: &str) -> Option<u64> {
    let (controller, path) = line.split_once(':')?.1.split_once(':')?;
    let (root, limit, usage, cache) = match controller {
        "" => ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        "memory" => (
            "/sys/fs/cgroup/memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
        _ => return None,
    };
    // In a namespace of its own a container sees itself at the root, whatever its path.
    let whole = Path::new(root).join(path.trim_start_matches('/'));
    let folder = if whole.join(limit).exists() { whole } else { Path::new(root).into() };
    let number = |name| fs::read_to_string(folder.join(name)).ok()?.trim().parse::<u64>().ok();
    let stat = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
    let used = number(usage)?.saturating_sub(field(&stat, cache).unwrap_or(0));
    Some(number(limit)?.saturating_sub(used))
}

fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_counts_what_is_available_and_swap() {
        let text = "MemTotal: 9 kB\nMemAvailable:    3 kB\nSwapFree: 1 kB\n";
        assert_eq!(machine(text), Some(4096));
        assert_eq!(machine("MemTotal: 9 kB"), None);
    }

    #[test]
    fn something_is_known_here_and_it_is_not_nothing() {
        let n = headroom();
        assert!(n > 1 << 20 && n < u64::MAX, "{n}");
    }
}
