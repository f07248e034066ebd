//! Decides which NICs are usable, and why the others are not.

use super::{Gpu, LinkLayer, Nic, Rules, Tier, Topology, UnusedNic};

/// The NICs that GPUs and nodes may be paired with, and the others with reasons.
///
/// Each test sees only what the tests before it kept.
pub(super) fn usable<'a>(
    topology: &Topology,
    nics: &'a [Nic],
    rules: &Rules,
) -> (Vec<&'a Nic>, Vec<UnusedNic>) {
    let mut filter = NicFilter { kept: nics.iter().collect(), left_out: Vec::new() };
    filter.exclude_if(|nic, _| rules.excludes(&nic.name).then(|| "a rule excludes it".to_owned()));
    filter.exclude_if(|nic, _| (!nic.port.is_active()).then(|| port_down(nic)));
    filter.exclude_if(virtual_function);
    filter.exclude_if(software);
    filter.exclude_if(other_fabric);
    filter.exclude_if(slow);
    filter.exclude_if(|nic, kept| far_from_gpus(topology, nic, kept));
    (filter.kept, filter.left_out)
}

struct NicFilter<'a> {
    kept: Vec<&'a Nic>,
    left_out: Vec<UnusedNic>,
}

impl<'a> NicFilter<'a> {
    fn exclude_if(&mut self, reason: impl Fn(&Nic, &[&'a Nic]) -> Option<String>) {
        let mut kept = Vec::with_capacity(self.kept.len());
        for nic in &self.kept {
            match reason(nic, &self.kept) {
                Some(reason) => self.left_out.push(UnusedNic { nic: nic.name.clone(), reason }),
                None => kept.push(*nic),
            }
        }
        self.kept = kept;
    }
}

fn port_down(nic: &Nic) -> String {
    match nic.port.number {
        0 => "it has no port".to_owned(),
        port => format!("its port {port} is {}", nic.port.state),
    }
}

/// A virtual function adds nothing if its physical function is used: they share the port.
fn virtual_function(nic: &Nic, kept: &[&Nic]) -> Option<String> {
    let parent = nic.parent?;
    let parent = kept.iter().find(|n| n.pci.as_ref().is_some_and(|p| p.address == parent))?;
    Some(format!("a virtual function of {}, which is here itself", parent.name))
}

fn software(nic: &Nic, kept: &[&Nic]) -> Option<String> {
    let real = kept.iter().any(|n| !n.software);
    (nic.software && real)
        .then(|| "a software device, while there are hardware RDMA devices".to_owned())
}

/// Devices of different link layers can't communicate, so the layer with the most bandwidth is
/// chosen.
fn other_fabric(nic: &Nic, kept: &[&Nic]) -> Option<String> {
    let carries = |link: LinkLayer| -> f64 {
        kept.iter().filter(|n| n.port.link == link).map(|n| n.port.gbps).sum()
    };
    let mut chosen = kept.first()?.port.link;
    for other in kept.iter().map(|n| n.port.link) {
        let (more, ours) = (carries(other), carries(chosen));
        // At equal bandwidth InfiniBand wins: it is there for this purpose.
        if more > ours || (more == ours && other < chosen) {
            chosen = other;
        }
    }
    (nic.port.link != chosen).then(|| {
        let devices = match kept.iter().filter(|n| n.port.link == chosen).count() {
            1 => "1 device carries".to_owned(),
            n => format!("{n} devices carry"),
        };
        let (ours, theirs) = (nic.port.link.name(), chosen.name());
        format!("{ours}, while {devices} {} Gb/s over {theirs}", carries(chosen))
    })
}

/// A much slower rail would delay writes that are cut over all rails.
fn slow(nic: &Nic, kept: &[&Nic]) -> Option<String> {
    let fastest = kept.iter().map(|n| n.port.gbps).fold(0.0, f64::max);
    (nic.port.gbps * 2.0 < fastest)
        .then(|| format!("{} Gb/s, less than half of the fastest ({fastest} Gb/s)", nic.port.gbps))
}

/// If every GPU has NICs on its switch, a NIC on no GPU's switch serves storage or management, and
/// may be in another network.
fn far_from_gpus(topology: &Topology, nic: &Nic, kept: &[&Nic]) -> Option<String> {
    let close = |gpu: &Gpu, nic: &Nic| topology.gpu_to_nic(gpu, nic).tier == Tier::Switch;
    let gpus = &topology.gpus;
    let all_have = gpus.iter().all(|gpu| kept.iter().any(|n| close(gpu, n)));
    let odd = !gpus.is_empty() && all_have && !gpus.iter().any(|gpu| close(gpu, nic));
    odd.then(|| {
        "on no GPU's switch, while every GPU has NICs on its switch: assumed to serve storage or management"
            .to_owned()
    })
}
