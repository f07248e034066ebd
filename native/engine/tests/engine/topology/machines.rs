//! Topology and expected pairing of each recorded machine.

use fabric_engine::topology::{
    cpus_near_within, pairing_for, tiers, LinkLayer, Location, PciAddress, Rules, Tier,
};

use super::{paired, reason_for, shown, trees::machine};

fn all_nics(topology: &fabric_engine::topology::Topology) -> Vec<String> {
    topology.nics.iter().map(|n| n.name.clone()).collect()
}

#[test]
fn p5_gives_each_gpu_the_four_efa_on_its_switch() {
    let p5 = machine("p5.48xlarge");
    assert_eq!((p5.gpus.len(), p5.nics.len(), p5.nodes.len()), (8, 32, 2));
    assert_eq!(p5.nics[0].port.link, LinkLayer::Other);
    let pairing = paired(&p5, "");
    assert_eq!(
        shown(&pairing.gpus),
        [
            "gpu0: rdmap79s0 rdmap80s0 rdmap81s0 rdmap82s0 (PIX)",
            "gpu1: rdmap96s0 rdmap97s0 rdmap98s0 rdmap99s0 (PIX)",
            "gpu2: rdmap113s0 rdmap114s0 rdmap115s0 rdmap116s0 (PIX)",
            "gpu3: rdmap130s0 rdmap131s0 rdmap132s0 rdmap133s0 (PIX)",
            "gpu4: rdmap147s0 rdmap148s0 rdmap149s0 rdmap150s0 (PIX)",
            "gpu5: rdmap164s0 rdmap165s0 rdmap166s0 rdmap167s0 (PIX)",
            "gpu6: rdmap181s0 rdmap182s0 rdmap183s0 rdmap184s0 (PIX)",
            "gpu7: rdmap198s0 rdmap199s0 rdmap200s0 rdmap201s0 (PIX)",
        ]
    );
    assert_eq!(pairing.gpus[0].reason, "all 4 NICs on the same PCIe switch");
    // One of each switch, so that the host's traffic doesn't compete with a single GPU's.
    assert_eq!(
        shown(&pairing.hosts),
        [
            "host0: rdmap79s0 rdmap96s0 rdmap113s0 rdmap130s0 (NODE)",
            "host1: rdmap147s0 rdmap164s0 rdmap181s0 rdmap198s0 (NODE)",
        ]
    );
    assert_eq!(pairing.hosts[0].reason, "4 of the 16 NICs on the same NUMA node");
    assert_eq!(pairing.left_out, []);
}

#[test]
fn p5en_shares_a_switch_between_two_gpus() {
    let pairing = paired(&machine("p5en.48xlarge"), "");
    assert_eq!(
        shown(&pairing.gpus),
        [
            "gpu0: rdmap85s0 rdmap86s0 (PIX)",
            "gpu1: rdmap87s0 rdmap88s0 (PIX)",
            "gpu2: rdmap110s0 rdmap111s0 (PIX)",
            "gpu3: rdmap112s0 rdmap113s0 (PIX)",
            "gpu4: rdmap135s0 rdmap136s0 (PIX)",
            "gpu5: rdmap137s0 rdmap138s0 (PIX)",
            "gpu6: rdmap160s0 rdmap161s0 (PIX)",
            "gpu7: rdmap162s0 rdmap163s0 (PIX)",
        ]
    );
    assert_eq!(
        pairing.gpus[0].reason,
        "2 of the 4 NICs on the same PCIe switch, shared out evenly to 2 GPUs"
    );
    assert_eq!(pairing.left_out, []);
}

#[test]
fn dgx_h100_leaves_storage_and_management_alone() {
    let dgx = machine("dgx-h100");
    let pairing = paired(&dgx, "");
    assert_eq!(
        shown(&pairing.gpus),
        [
            "gpu0: mlx5_0 (PXB)",
            "gpu1: mlx5_3 (PXB)",
            "gpu2: mlx5_4 (PXB)",
            "gpu3: mlx5_5 (PXB)",
            "gpu4: mlx5_6 (PXB)",
            "gpu5: mlx5_9 (PXB)",
            "gpu6: mlx5_10 (PXB)",
            "gpu7: mlx5_11 (PXB)",
        ]
    );
    assert_eq!(pairing.gpus[7].reason, "the only NIC on the same PCIe switch");
    assert_eq!(
        shown(&pairing.hosts),
        [
            "host0: mlx5_0 mlx5_3 mlx5_4 mlx5_5 (NODE)",
            "host1: mlx5_6 mlx5_9 mlx5_10 mlx5_11 (NODE)"
        ]
    );
    let left_out: Vec<_> = pairing.left_out.iter().map(|l| l.nic.as_str()).collect();
    assert_eq!(left_out, ["mlx5_8", "mlx5_1", "mlx5_2", "mlx5_7"]);
    assert_eq!(reason_for(&pairing, "mlx5_8"), "its port 1 is DOWN");
    assert_eq!(
        reason_for(&pairing, "mlx5_1"),
        "Ethernet, while 9 devices carry 3600 Gb/s over InfiniBand"
    );
    assert!(reason_for(&pairing, "mlx5_7").starts_with("on no GPU's switch"));
}

#[test]
fn gb200_pairs_within_each_socket() {
    let gb200 = machine("gb200-nvl72");
    let pairing = paired(&gb200, "");
    assert_eq!(
        shown(&pairing.gpus),
        [
            "gpu0: mlx5_0 (NODE)",
            "gpu1: mlx5_1 (NODE)",
            "gpu2: mlx5_4 (NODE)",
            "gpu3: mlx5_5 (NODE)"
        ]
    );
    // The 32 nodes that are GPU memory have no CPUs: nothing runs there.
    assert_eq!(
        shown(&pairing.hosts),
        ["host0: mlx5_0 mlx5_1 (NODE)", "host1: mlx5_4 mlx5_5 (NODE)"]
    );
    assert_eq!(pairing.left_out.len(), 4);
    let reason = "Ethernet, while 4 devices carry 1600 Gb/s over InfiniBand";
    assert_eq!(reason_for(&pairing, "mlx5_2"), reason);
    assert_eq!(cpus_near_within(&gb200, &["mlx5_4".into()], &[0, 71, 72, 143]), [72, 143]);
}

#[test]
fn a_passthrough_guest_pairs_by_order() {
    let guest = machine("passthrough-vm");
    assert_eq!(guest.nics[0].numa, None);
    let pairing = paired(&guest, "");
    let expected: Vec<_> = (0..8).map(|i| format!("gpu{i}: mlx5_{i} (PHB)")).collect();
    assert_eq!(shown(&pairing.gpus), expected);
    assert_eq!(
        pairing.gpus[0].reason,
        "1 of the 8 NICs under the same root complex, shared out evenly to 8 GPUs"
    );
    assert_eq!(shown(&pairing.hosts)[0], "host0: mlx5_0 mlx5_2 mlx5_4 mlx5_6 (?)");
    // The NICs' NUMA node is unknown, but `local_cpulist` lists CPUs near them.
    assert_eq!(cpus_near_within(&guest, &["mlx5_0".into()], &[3, 100, 900]), [3, 100]);
}

#[test]
fn a_passthrough_guest_with_half_the_nics_shares_them_between_neighbours() {
    let pairing = paired(&machine("passthrough-vm"), "exclude=mlx5_1,mlx5_3,mlx5_5,mlx5_7");
    let expected: Vec<_> = (0..8).map(|i| format!("gpu{i}: mlx5_{} (PHB)", i / 2 * 2)).collect();
    assert_eq!(shown(&pairing.gpus), expected);
    assert_eq!(
        pairing.gpus[0].reason,
        "1 of the 4 NICs under the same root complex, which 8 GPUs share"
    );
    assert_eq!(reason_for(&pairing, "mlx5_7"), "a rule excludes it");
}

#[test]
fn a_laptop_has_a_gpu_and_no_rdma_device() {
    let laptop = machine("laptop");
    let names: Vec<_> = laptop.gpus.iter().map(|g| g.pci.address.to_string()).collect();
    assert_eq!(names, ["0000:01:00.0"], "integrated graphics don't count as a GPU");
    assert_eq!(laptop.gpus[0].numa, Some(0), "with one node, everything is on it");
    let pairing = paired(&laptop, "");
    assert_eq!(shown(&pairing.gpus), ["gpu0:"]);
    assert_eq!(pairing.gpus[0].reason, "no usable RDMA device");
    assert_eq!(shown(&pairing.hosts), ["host0:"]);
    let gpu = Location::Gpu("01:00.0".parse::<PciAddress>().expect("an address"));
    let none = pairing_for(&laptop, gpu, &[], 4, &Rules::default());
    assert_eq!(none, Err("no device for gpu0: there are none".to_owned()));
    // Network interfaces are located too, for transports that open them.
    let wifi = ["wlp0s20f3".to_owned(), "lo".to_owned()];
    assert_eq!(pairing_for(&laptop, gpu, &wifi, 4, &Rules::default()), Ok(vec![wifi[0].clone()]));
}

#[test]
fn soft_roce_is_used_if_it_is_the_only_device() {
    let guest = machine("soft-roce-guest");
    assert!(guest.nics.iter().all(|n| n.software && n.pci.is_none()));
    assert_eq!(guest.nics[3].interfaces, ["h1r1"]);
    let pairing = paired(&guest, "");
    assert_eq!(shown(&pairing.hosts), ["host0: rxe_h0r0 rxe_h0r1 rxe_h1r0 rxe_h1r1 (?)"]);
    assert_eq!(pairing.hosts[0].rails[0].distance.tier, Tier::Unknown);
    let own_nics = ["rxe_h1r0".to_owned(), "rxe_h1r1".to_owned()];
    assert_eq!(
        pairing_for(&guest, Location::Host, &own_nics, 4, &Rules::default()),
        Ok(own_nics.to_vec())
    );
    assert_eq!(cpus_near_within(&guest, &own_nics, &[0, 1]), [] as [usize; 0]);
}

#[test]
fn the_distances_have_the_names_that_nvidia_smi_prints() {
    let dgx = machine("dgx-h100");
    let row = |gpu: usize| -> Vec<_> {
        dgx.nics.iter().map(|nic| dgx.gpu_to_nic(&dgx.gpus[gpu], nic).code()).collect()
    };
    let near = ["NODE"; 6];
    let far = ["SYS"; 6];
    assert_eq!(row(0), [&["PXB"], &near[1..], &far[..]].concat());
    assert_eq!(row(7), [&far[..], &near[1..], &["PXB"]].concat());
}

#[test]
fn interfaces_are_as_near_as_their_adapters() {
    let dgx = machine("dgx-h100");
    let interfaces = ["ibp64s0".to_owned(), "ibp24s0".to_owned()];
    let gpu = Location::Gpu(dgx.gpus[0].pci.address);
    let found = pairing_for(&dgx, gpu, &interfaces, 4, &Rules::default());
    assert_eq!(found, Ok(vec!["ibp24s0".to_owned()]));
}

#[test]
fn rails_are_near_or_far_from_the_memory_that_an_engine_serves() {
    let dgx = machine("dgx-h100");
    let devices = ["mlx5_0", "mlx5_1", "mlx5_9", "eth0"].map(str::to_owned);
    let gpu = Location::Gpu(dgx.gpus[0].pci.address);
    let expected = [Tier::Switch, Tier::Node, Tier::System, Tier::Unknown];
    assert_eq!(tiers(&dgx, gpu, &devices), expected);
    let node = [Tier::Node, Tier::Node, Tier::System, Tier::Unknown];
    assert_eq!(tiers(&dgx, Location::Node(0), &devices), node);
    // Host memory may lie on either node.
    assert_eq!(tiers(&dgx, Location::Host, &devices), [Tier::Unknown; 4]);
}

#[test]
fn rails_of_two_nodes_are_driven_from_the_first_ones() {
    let dgx = machine("dgx-h100");
    let all: Vec<usize> = (0..224).collect();
    let near = |nics: &[&str]| {
        let nics: Vec<String> = nics.iter().map(|n| (*n).to_owned()).collect();
        cpus_near_within(&dgx, &nics, &all)
    };
    assert_eq!(near(&["mlx5_0"]).len(), 112);
    assert_eq!(near(&["mlx5_11", "mlx5_0"])[0], 56, "a tie goes to the first rail");
    assert_eq!(near(&["mlx5_11", "mlx5_0", "mlx5_3"])[0], 0, "else most rails win");
    assert_eq!(cpus_near_within(&dgx, &all_nics(&dgx), &[500]), [] as [usize; 0]);
}

#[test]
fn rails_of_a_node_that_is_not_listed_are_driven_from_their_own_cpus() {
    let mut dgx = machine("dgx-h100");
    let nics = ["mlx5_9".to_owned(), "mlx5_10".to_owned()];
    let all: Vec<usize> = (0..224).collect();
    let near = cpus_near_within(&dgx, &nics, &all);
    assert_eq!(near.len(), 112);
    dgx.nodes.retain(|node| node.id == 0);
    assert_eq!(cpus_near_within(&dgx, &nics, &all), near);
    assert_eq!(cpus_near_within(&dgx, &nics, &near[..4]), near[..4]);
    // The GPUs of that node still have the NICs on their switches.
    let pairing = paired(&dgx, "");
    assert_eq!(shown(&pairing.gpus)[5], "gpu5: mlx5_9 (PXB)");
    assert_eq!(shown(&pairing.hosts), ["host0: mlx5_0 mlx5_3 mlx5_4 mlx5_5 (NODE)"]);
}
