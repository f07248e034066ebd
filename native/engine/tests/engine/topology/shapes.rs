//! Single features of machines, each in a minimal tree.

use fabric_engine::topology::Topology;

use super::{paired, reason_for, shown, trees::tree};
use crate::TestFolder;

/// Builds a tree line by line.
#[derive(Default)]
struct Machine(String);

impl Machine {
    fn node(mut self, id: u32, cpus: &str, distances: &str) -> Self {
        let node = format!("devices/system/node/node{id}");
        self.0 += &format!("{node} | cpulist={cpus} distance=\"{distances}\"\n");
        self
    }

    fn gpu(mut self, path: &str, node: i32) -> Self {
        self.0 += &pci(path, &format!("class=0x030200 vendor=0x10de numa_node={node}"));
        self
    }

    fn nic(mut self, path: &str, node: i32, name: &str, port: &str) -> Self {
        self.0 += &pci(path, &format!("class=0x020700 vendor=0x15b3 numa_node={node}"));
        let dir = format!("devices/{path}/infiniband/{name}");
        self.0 += &format!("{dir}/ports/1 | {port}\n{dir}/device -> ../../../{}\n", last(path));
        self.0 += &format!("class/infiniband/{name} -> ../../{dir}\n");
        self
    }

    fn line(mut self, line: &str) -> Self {
        self.0 += &format!("{line}\n");
        self
    }

    fn read(&self) -> Topology {
        tree(&self.0)
    }
}

fn last(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

fn pci(path: &str, files: &str) -> String {
    let address = last(path);
    format!("devices/{path} | {files}\nbus/pci/devices/{address} -> ../../../devices/{path}\n")
}

const IB: &str = r#"state="4: ACTIVE" rate="400 Gb/sec (4X NDR)" link_layer=InfiniBand"#;
const SLOW: &str = r#"state="4: ACTIVE" rate="100 Gb/sec (4X EDR)" link_layer=InfiniBand"#;
const HALF: &str = r#"state="4: ACTIVE" rate="200 Gb/sec (4X HDR)" link_layer=InfiniBand"#;
const ROCE: &str = r#"state="4: ACTIVE" rate="400 Gb/sec (4X NDR)" link_layer=Ethernet"#;

#[test]
fn the_longest_common_path_is_nearest() {
    // Two small switches under a big one.
    let topology = Machine::default()
        .gpu("pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:00.0/0000:13:00.0", 0)
        .nic("pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:00.0/0000:14:00.0", 0, "near", IB)
        .nic("pci0000:10/0000:10:01.0/0000:11:01.0/0000:15:00.0/0000:16:00.0", 0, "far", IB)
        .nic("pci0000:10/0000:10:02.0/0000:17:00.0", 0, "root", IB)
        .read();
    let codes: Vec<_> =
        topology.nics.iter().map(|n| topology.gpu_to_nic(&topology.gpus[0], n).code()).collect();
    assert_eq!(codes, ["PIX", "PXB", "PHB"]);
    assert_eq!(shown(&paired(&topology, "").gpus), ["gpu0: near (PIX)"]);
}

#[test]
fn without_a_local_nic_the_nearest_node_is_used() {
    // Four nodes on two sockets; NICs on nodes 1 and 2.
    let rows = ["10 12 32 32", "12 10 32 32", "32 32 10 12", "32 32 12 10"];
    let mut machine = Machine::default();
    for (id, row) in rows.iter().enumerate() {
        machine = machine.node(id as u32, &id.to_string(), row);
    }
    let topology = machine
        .gpu("pci0000:10/0000:10:01.0/0000:11:00.0", 0)
        .gpu("pci0000:20/0000:20:01.0/0000:21:00.0", 3)
        .nic("pci0000:30/0000:30:01.0/0000:31:00.0", 1, "left", IB)
        .nic("pci0000:40/0000:40:01.0/0000:41:00.0", 2, "right", IB)
        .read();
    let pairing = paired(&topology, "");
    assert_eq!(shown(&pairing.gpus), ["gpu0: left (SYS)", "gpu1: right (SYS)"]);
    let hosts =
        ["host0: left (SYS)", "host1: left (NODE)", "host2: right (NODE)", "host3: right (SYS)"];
    assert_eq!(shown(&pairing.hosts), hosts);
}

#[test]
fn the_nearer_gpu_chooses_first() {
    let topology = Machine::default()
        .node(0, "0", "10 20")
        .node(1, "1", "20 10")
        .gpu("pci0000:10/0000:10:01.0/0000:11:00.0", 1)
        .gpu("pci0000:20/0000:20:01.0/0000:21:00.0/0000:22:00.0", 0)
        .nic("pci0000:20/0000:20:01.0/0000:21:00.0/0000:23:00.0", 0, "a", IB)
        .nic("pci0000:20/0000:20:02.0/0000:24:00.0", 0, "b", IB)
        .read();
    // gpu1 has `a` on its switch; gpu0 is equally far from both and gets what is free.
    let gpus = shown(&paired(&topology, "").gpus);
    assert_eq!(gpus, ["gpu0: b (SYS)", "gpu1: a (PIX)"]);
}

#[test]
fn nics_that_cant_be_shared_evenly_are_unused() {
    let mut machine = Machine::default();
    for i in 0..2 {
        machine = machine.gpu(&format!("pci0000:10/0000:10:01.0/0000:1{i}:00.0"), 0);
    }
    for i in 0..3 {
        let path = format!("pci0000:10/0000:10:01.0/0000:2{i}:00.0");
        machine = machine.nic(&path, 0, &format!("n{i}"), IB);
    }
    let pairing = paired(&machine.read(), "host=n0");
    assert_eq!(shown(&pairing.gpus), ["gpu0: n0 (PIX)", "gpu1: n1 (PIX)"]);
    assert!(reason_for(&pairing, "n2").starts_with("not needed: it can't be shared evenly"));
}

#[test]
fn a_virtual_function_is_unused_if_its_device_is_present() {
    let port = "pci0000:10/0000:10:01.0/0000:11:00";
    let both = Machine::default()
        .nic(&format!("{port}.0"), 0, "mlx5_0", IB)
        .nic(&format!("{port}.2"), 0, "mlx5_1", IB)
        .line(&format!("devices/{port}.2/physfn -> ../0000:11:00.0"));
    let pairing = paired(&both.read(), "");
    assert_eq!(shown(&pairing.hosts), ["host0: mlx5_0 (NODE)"]);
    let reason = "a virtual function of mlx5_0, which is here itself";
    assert_eq!(reason_for(&pairing, "mlx5_1"), reason);
    let alone = paired(&both.read(), "exclude=mlx5_0");
    assert_eq!(shown(&alone.hosts), ["host0: mlx5_1 (NODE)"]);
}

#[test]
fn slow_and_software_devices_are_unused() {
    let topology = Machine::default()
        .nic("pci0000:10/0000:10:01.0/0000:11:00.0", 0, "fast", IB)
        .nic("pci0000:10/0000:10:02.0/0000:12:00.0", 0, "slow", SLOW)
        .nic("pci0000:10/0000:10:03.0/0000:13:00.0", 0, "half", HALF)
        .line("devices/pci0000:10/0000:10:01.0/0000:11:00.0/net/ib0 | operstate=up")
        .line(
            "devices/pci0000:10/0000:10:01.0/0000:11:00.0/net/ib0/device -> ../../../0000:11:00.0",
        )
        .line("class/net/ib0 -> ../../devices/pci0000:10/0000:10:01.0/0000:11:00.0/net/ib0")
        .line("devices/virtual/infiniband/rxe0 | parent=ib0")
        .line(&format!("devices/virtual/infiniband/rxe0/ports/1 | {ROCE}"))
        .line("class/infiniband/rxe0 -> ../../devices/virtual/infiniband/rxe0")
        .read();
    let soft = topology.nic("rxe0").expect("a soft device");
    assert!(soft.software);
    let place = soft.pci.as_ref().expect("the PCI location of the underlying adapter");
    assert_eq!(place.address.to_string(), "0000:11:00.0");
    let pairing = paired(&topology, "");
    assert_eq!(shown(&pairing.hosts), ["host0: fast half (NODE)"]);
    let reason = "100 Gb/s, less than half of the fastest (400 Gb/s)";
    assert_eq!(reason_for(&pairing, "slow"), reason);
    assert!(reason_for(&pairing, "rxe0").starts_with("a software device"));
}

#[test]
fn the_link_layer_with_more_bandwidth_is_chosen() {
    let mixed = |a, b| {
        Machine::default()
            .nic("pci0000:10/0000:10:01.0/0000:11:00.0", 0, "a", a)
            .nic("pci0000:10/0000:10:02.0/0000:12:00.0", 0, "b", b)
            .read()
    };
    assert_eq!(shown(&paired(&mixed(SLOW, ROCE), "").hosts), ["host0: b (NODE)"]);
    let tie = paired(&mixed(ROCE, IB), "");
    assert_eq!(shown(&tie.hosts), ["host0: b (NODE)"], "InfiniBand where both carry the same");
    let reason = "Ethernet, while 1 device carries 400 Gb/s over InfiniBand";
    assert_eq!(reason_for(&tie, "a"), reason);
}

#[test]
fn an_active_port_represents_its_device() {
    let topology = Machine::default()
        .nic(
            "pci0000:10/0000:10:01.0/0000:11:00.0",
            0,
            "two",
            r#"state="1: DOWN" rate="400 Gb/sec""#,
        )
        .line(&format!(
            "devices/pci0000:10/0000:10:01.0/0000:11:00.0/infiniband/two/ports/2 | {SLOW}"
        ))
        .read();
    let port = &topology.nics[0].port;
    assert_eq!((port.number, port.gbps), (2, 100.0));
}

#[test]
fn an_auxiliary_device_has_its_adapter_s_location() {
    let path = "pci0000:10/0000:10:01.0/0000:11:00.0";
    let topology = Machine::default()
        .line(&pci(path, "class=0x020700 vendor=0x15b3 numa_node=0"))
        .line(&format!("devices/{path}/mlx5_core.sf.2/infiniband/sf2/ports/1 | {IB}"))
        .line(&format!(
            "devices/{path}/mlx5_core.sf.2/infiniband/sf2/device -> ../../../mlx5_core.sf.2"
        ))
        .line(&format!(
            "class/infiniband/sf2 -> ../../devices/{path}/mlx5_core.sf.2/infiniband/sf2"
        ))
        .read();
    let nic = topology.nic("sf2").expect("a sub-function");
    assert_eq!(nic.pci.as_ref().map(|p| p.address.to_string()).as_deref(), Some("0000:11:00.0"));
    assert_eq!(nic.numa, Some(0));
}

#[test]
fn a_folder_that_is_not_sysfs_is_refused() {
    let empty = TestFolder::new();
    let refused = Topology::read(&empty.0).expect_err("an empty folder");
    assert!(refused.contains("is no sysfs tree"), "{refused}");
    let missing = Topology::read(&empty.0.join("gone")).expect_err("no folder");
    assert!(missing.starts_with("can't read "), "{missing}");
}

#[test]
fn this_machine_can_be_read() {
    let topology = Topology::read(std::path::Path::new("/sys")).expect("sysfs");
    assert!(!topology.nodes.is_empty());
    paired(&topology, "");
}
