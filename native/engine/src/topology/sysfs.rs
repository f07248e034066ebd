//! Reads a topology from sysfs, or from a recorded copy of it.
//!
//! Unreadable entries count as absent: containers hide parts of sysfs, and a machine without RDMA
//! devices lacks the whole class.

use std::{
    cmp::Ordering,
    fs,
    path::{Path, PathBuf},
    str::FromStr,
};

use super::{cpus::parse_cpus, Gpu, Interface, LinkLayer, Nic, Node, PciLocation, Port, Topology};

const NVIDIA: u16 = 0x10de;
const AMD: u16 = 0x1002;

impl Topology {
    /// Reads the tree at `root`; for the local machine that is `/sys`.
    ///
    /// # Errors
    /// A sentence, if there is no sysfs tree at `root`.
    pub fn read(root: &Path) -> Result<Self, String> {
        let tree = SysfsTree::open(root)?;
        let nodes = tree.nodes();
        Ok(Self {
            gpus: tree.gpus(&nodes),
            nics: tree.nics(&nodes),
            interfaces: tree.interfaces(&nodes),
            nodes,
        })
    }
}

struct SysfsTree {
    root: PathBuf,
}

impl SysfsTree {
    fn open(root: &Path) -> Result<Self, String> {
        let shown = root.display();
        let root = fs::canonicalize(root).map_err(|e| format!("can't read {shown}: {e}"))?;
        if !root.join("devices").is_dir() {
            return Err(format!(
                "{shown} is no sysfs tree (it has no `devices`); pass /sys or a recorded copy of it"
            ));
        }
        Ok(Self { root })
    }

    fn nodes(&self) -> Vec<Node> {
        let base = self.root.join("devices/system/node");
        let mut ids: Vec<u32> = names(&base)
            .iter()
            .filter_map(|name| name.strip_prefix("node").and_then(|id| id.parse().ok()))
            .collect();
        ids.sort_unstable();
        if ids.is_empty() {
            // A kernel without NUMA.
            let online = self.root.join("devices/system/cpu/online");
            return vec![Node { id: 0, cpus: cpus(&online), distances: vec![(0, 10)] }];
        }
        let node = |id: &u32| {
            let dir = base.join(format!("node{id}"));
            let row = text(&dir.join("distance")).unwrap_or_default();
            let row = row.split_whitespace().filter_map(|d| d.parse().ok());
            Node {
                id: *id,
                cpus: cpus(&dir.join("cpulist")),
                distances: ids.iter().copied().zip(row).collect(),
            }
        };
        ids.iter().map(node).collect()
    }

    fn gpus(&self, nodes: &[Node]) -> Vec<Gpu> {
        let base = self.root.join("bus/pci/devices");
        let mut gpus: Vec<Gpu> = names(&base)
            .iter()
            .filter_map(|name| {
                let dir = base.join(name);
                // Machines have hundreds of PCI devices: test the class first.
                let class = hex(&dir.join("class"))? >> 8;
                let vendor = hex(&dir.join("vendor"))? as u16;
                let drawing = matches!(class, 0x0300 | 0x0302);
                // AMD's accelerators have a separate class.
                let gpu = (drawing && matches!(vendor, NVIDIA | AMD))
                    || (class == 0x1200 && vendor == AMD);
                let pci = self.pci(&dir).filter(|_| gpu)?;
                Some(Gpu {
                    name: String::new(),
                    pci,
                    vendor,
                    device: hex(&dir.join("device")).unwrap_or(0) as u16,
                    numa: numa(&dir, nodes),
                })
            })
            .collect();
        gpus.sort_by_key(|g| g.pci.address);
        for (i, gpu) in gpus.iter_mut().enumerate() {
            gpu.name = format!("gpu{i}");
        }
        gpus
    }

    fn nics(&self, nodes: &[Node]) -> Vec<Nic> {
        let base = self.root.join("class/infiniband");
        let mut nics: Vec<Nic> =
            names(&base).into_iter().map(|name| self.nic(&base.join(&name), name, nodes)).collect();
        nics.sort_by(|a, b| {
            let key = |n: &Nic| (n.pci.is_none(), n.pci.as_ref().map(|p| p.address));
            key(a).cmp(&key(b)).then_with(|| by_number(&a.name, &b.name))
        });
        nics
    }

    fn nic(&self, dir: &Path, name: String, nodes: &[Node]) -> Nic {
        let software = !dir.join("device").exists();
        let mut interfaces = names(&dir.join("device/net"));
        interfaces.sort_by(|a, b| by_number(a, b));
        // For soft-RoCE a file names the underlying interface; later kernels have it in the GID
        // table only.
        let over = ["parent", "ports/1/gid_attrs/ndevs/0"];
        let over = over.iter().find_map(|file| text(&dir.join(file)).filter(|t| !t.is_empty()));
        if let (true, Some(over)) = (software, over) {
            interfaces = vec![over];
        }
        let device = match interfaces.first() {
            Some(interface) if software => {
                self.root.join("class/net").join(interface).join("device")
            }
            _ => dir.join("device"),
        };
        Nic {
            pci: self.pci(&device),
            software,
            numa: numa(&device, nodes),
            cpus: cpus(&device.join("local_cpulist")),
            port: port(&dir.join("ports")),
            interfaces,
            parent: self.pci(&device.join("physfn")).map(|p| p.address),
            name,
        }
    }

    fn interfaces(&self, nodes: &[Node]) -> Vec<Interface> {
        let base = self.root.join("class/net");
        let mut all: Vec<Interface> = names(&base)
            .into_iter()
            .map(|name| {
                let device = base.join(&name).join("device");
                Interface { pci: self.pci(&device), numa: numa(&device, nodes), name }
            })
            .collect();
        all.sort_by(|a, b| by_number(&a.name, &b.name));
        all
    }

    fn pci(&self, link: &Path) -> Option<PciLocation> {
        let path = fs::canonicalize(link).ok()?;
        PciLocation::of(path.strip_prefix(&self.root).ok()?)
    }
}

/// The fastest active port, or else the fastest port.
fn port(dir: &Path) -> Port {
    let mut ports: Vec<Port> = names(dir)
        .iter()
        .filter_map(|name| {
            let dir = dir.join(name);
            let link = match text(&dir.join("link_layer")).as_deref() {
                Some("InfiniBand") => LinkLayer::InfiniBand,
                Some("Ethernet") => LinkLayer::Ethernet,
                _ => LinkLayer::Other,
            };
            // "4: ACTIVE", "400 Gb/sec (4X NDR)"
            let state = text(&dir.join("state")).unwrap_or_default();
            let state = state.rsplit(": ").next().unwrap_or_default().to_owned();
            let rate = text(&dir.join("rate")).unwrap_or_default();
            let gbps = rate.split(' ').next().and_then(|n| n.parse().ok()).unwrap_or(0.0);
            Some(Port { number: name.parse().ok()?, link, state, gbps })
        })
        .collect();
    ports.sort_by(|a, b| {
        let key = |p: &Port| (p.is_active(), p.gbps);
        key(b).partial_cmp(&key(a)).unwrap_or(Ordering::Equal).then(a.number.cmp(&b.number))
    });
    let none = Port { number: 0, link: LinkLayer::Other, state: "without ports".into(), gbps: 0.0 };
    ports.into_iter().next().unwrap_or(none)
}

/// The NUMA node of a device. On a machine with one node, a device without an entry is on it.
fn numa(device: &Path, nodes: &[Node]) -> Option<u32> {
    // -1 if the firmware does not know; no file in a kernel without NUMA.
    let said: Option<u32> = number(&device.join("numa_node"));
    match nodes {
        [only] if device.exists() => Some(said.unwrap_or(only.id)),
        _ => said,
    }
}

fn names(dir: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    entries.flatten().filter_map(|e| e.file_name().into_string().ok()).collect()
}

fn text(file: &Path) -> Option<String> {
    fs::read_to_string(file).ok().map(|t| t.trim().to_owned())
}

fn number<T: FromStr>(file: &Path) -> Option<T> {
    text(file)?.parse().ok()
}

fn hex(file: &Path) -> Option<u32> {
    u32::from_str_radix(text(file)?.trim_start_matches("0x"), 16).ok()
}

fn cpus(file: &Path) -> Vec<usize> {
    parse_cpus(&text(file).unwrap_or_default())
}

/// Numeric order: `mlx5_2` before `mlx5_10`.
pub(super) fn by_number(a: &str, b: &str) -> Ordering {
    let (mut a, mut b) = (a, b);
    loop {
        let ((wa, ra), (wb, rb)) = (head(a), head(b));
        let order = match (wa.parse::<u64>(), wb.parse::<u64>()) {
            (Ok(x), Ok(y)) => x.cmp(&y).then(wa.cmp(wb)),
            _ => wa.cmp(wb),
        };
        if order.is_ne() || (ra.is_empty() && rb.is_empty()) {
            return order.then(ra.cmp(rb));
        }
        (a, b) = (ra, rb);
    }
}

/// A run of digits or of other characters, and the rest.
fn head(s: &str) -> (&str, &str) {
    let digits = s.starts_with(|c: char| c.is_ascii_digit());
    let end = s.find(|c: char| c.is_ascii_digit() != digits).unwrap_or(s.len());
    s.split_at(end)
}

#[cfg(test)]
mod tests {
    use super::by_number;

    #[test]
    fn names_sort_by_their_numbers() {
        let mut names = ["rxe_h1r0", "mlx5_10", "mlx5_2", "mlx5_bond_0", "rxe_h0r2", "mlx5_", "e"];
        names.sort_by(|a, b| by_number(a, b));
        let expected = ["e", "mlx5_", "mlx5_2", "mlx5_10", "mlx5_bond_0", "rxe_h0r2", "rxe_h1r0"];
        assert_eq!(names, expected);
    }
}
