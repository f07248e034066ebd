//! PCI addresses, and the bridges between a device and its root complex.

use std::{fmt, path::Path, str::FromStr};

/// A PCI address such as `0000:18:00.0`, in the system's order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    pub domain: u32,
    pub bus: u8,
    pub device: u8,
    pub function: u8,
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { domain, bus, device, function } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function:x}")
    }
}

impl FromStr for PciAddress {
    type Err = String;

    /// Parses every spelling in use: CUDA's `0000:18:00.0`, NVML's `00000000:18:00.0`, lspci's
    /// `18:00.0`.
    fn from_str(text: &str) -> Result<Self, String> {
        parse(text)
            .ok_or_else(|| format!("`{text}` isn't a PCI address; write it like 0000:18:00.0"))
    }
}

fn parse(text: &str) -> Option<PciAddress> {
    let (rest, function) = text.rsplit_once('.')?;
    let (rest, device) = rest.rsplit_once(':')?;
    let (domain, bus) = rest.rsplit_once(':').unwrap_or(("0", rest));
    let hex = |digits: &str, most: usize| {
        let fits =
            (1..=most).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_hexdigit());
        fits.then(|| u32::from_str_radix(digits, 16).ok()).flatten()
    };
    Some(PciAddress {
        domain: hex(domain, 8)?,
        bus: hex(bus, 2)? as u8,
        device: hex(device, 2).filter(|d| *d < 32)? as u8,
        function: hex(function, 1).filter(|f| *f < 8)? as u8,
    })
}

/// A device's location in the PCI tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PciLocation {
    pub address: PciAddress,
    /// The root complex (host bridge) in sysfs: `pci0000:15`.
    pub root: String,
    /// The bridges from the root port down to the device.
    pub bridges: Vec<PciAddress>,
}

impl PciLocation {
    /// The location that a path below `/sys/devices` describes; `None` if it isn't a PCI device.
    ///
    /// Path parts below the last PCI device are ignored: `.../0000:18:00.0/mlx5_core.sf.2` is at
    /// `0000:18:00.0`. Below a bridge with a separate PCI domain (Intel VMD), only that domain
    /// counts.
    pub(super) fn of(path: &Path) -> Option<Self> {
        let mut root = None;
        let mut chain = Vec::new();
        for part in path.components().filter_map(|c| c.as_os_str().to_str()) {
            if is_root(part) {
                root = Some(part);
                chain.clear();
            } else if root.is_some() {
                // Only full addresses: `18:00.0` may be another name.
                let full = part.len() >= "0000:00:00.0".len();
                chain.extend(parse(part).filter(|_| full));
            }
        }
        let address = chain.pop()?;
        Some(Self { address, root: root?.to_owned(), bridges: chain })
    }

    /// Number of bridges that two devices share, from the root port down; 0 under different root
    /// complexes.
    pub fn shared_bridges(&self, other: &Self) -> usize {
        if self.root != other.root {
            return 0;
        }
        self.bridges.iter().zip(&other.bridges).take_while(|(a, b)| a == b).count()
    }
}

fn is_root(part: &str) -> bool {
    let Some((domain, bus)) = part.strip_prefix("pci").and_then(|r| r.split_once(':')) else {
        return false;
    };
    let hex = |digits: &str| !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_hexdigit());
    domain.len() >= 4 && hex(domain) && bus.len() == 2 && hex(bus)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_in_every_spelling() {
        let expected = PciAddress { domain: 0, bus: 0x1b, device: 0, function: 1 };
        for text in ["0000:1b:00.1", "00000000:1B:00.1", "1b:00.1"] {
            assert_eq!(text.parse(), Ok(expected), "{text}");
        }
        assert_eq!(expected.to_string(), "0000:1b:00.1");
        let far = "10000:e1:1f.7".parse::<PciAddress>().expect("VMD domains have five digits");
        assert_eq!(far.to_string(), "10000:e1:1f.7");
        for text in ["", "1b", "mlx5_0", "0000:1b:00", "0000:1b:20.0", "0000:1b:00.8", "+1:00.0"] {
            assert!(text.parse::<PciAddress>().is_err(), "{text}");
        }
    }

    #[test]
    fn locations_are_parsed_from_paths() {
        let at = |path| PciLocation::of(Path::new(path));
        let nic = at("/sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:18:00.0/net/ib0");
        let nic = nic.expect("a PCI device");
        assert_eq!((nic.root.as_str(), nic.bridges.len()), ("pci0000:15", 2));
        assert_eq!(nic.address.to_string(), "0000:18:00.0");
        let vmd =
            at("/sys/devices/pci0000:00/0000:00:0e.0/pci10000:e0/10000:e0:01.0/10000:e1:00.0");
        let vmd = vmd.expect("a PCI device");
        assert_eq!((vmd.root.as_str(), vmd.bridges.len()), ("pci10000:e0", 1));
        let guid = at("/sys/devices/LNXSYSTM:00/VMBUS:00/47505500-0001/pci0001:00/0001:00:00.0");
        assert_eq!(guid.expect("a PCI device").bridges, []);
        assert_eq!(at("/sys/devices/virtual/infiniband/rxe0"), None);
        assert_eq!(at("/sys/devices/pci0000:15"), None);
    }
}
