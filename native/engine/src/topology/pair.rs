//! Chooses rails for each GPU and NUMA node, with reasons.

use std::cmp::Reverse;

use super::{
    cpus,
    rules::Assignment,
    share::{share, spread, Demand, Share},
    usable::usable,
    Distance, Gpu, LinkLayer, Nic, PciAddress, PciLocation, Port, Rules, Tier, Topology,
};

/// Whose memory the rails are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Location {
    /// Host memory, of the NUMA node where this process runs or else of the best connected one.
    Host,
    /// Host memory of one NUMA node.
    Node(u32),
    Gpu(PciAddress),
}

/// Result of [`pair()`]: GPUs and nodes with their NICs, and the NICs.
#[derive(Clone, Debug, PartialEq)]
pub struct Pairing {
    pub gpus: Vec<RailChoice>,
    /// For each NUMA node that has CPUs.
    pub hosts: Vec<RailChoice>,
    /// NICs that no GPU or node uses.
    pub left_out: Vec<UnusedNic>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct RailChoice {
    pub location: Location,
    /// `gpu0`, `host0`.
    pub name: String,
    pub rails: Vec<Rail>,
    pub reason: String,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Rail {
    pub nic: String,
    pub distance: Distance,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnusedNic {
    pub nic: String,
    pub reason: String,
}

/// Chooses the rails for every GPU and NUMA node of a machine.
///
/// # Errors
/// A sentence, if a rule matches nothing on this machine; it lists what exists.
pub fn pair(topology: &Topology, rules: &Rules) -> Result<Pairing, String> {
    pair_among(topology, &topology.nics, rules)
}

/// Chooses the rails for one location among the devices that a transport can open.
///
/// `candidates` are names of RDMA devices or network interfaces. Devices that the topology does not
/// know count as equally near to everything.
///
/// # Errors
/// A sentence: a rule matches nothing or leaves no device, no candidate is usable, or the GPU does
/// not exist.
pub fn pairing_for(
    topology: &Topology,
    location: Location,
    candidates: &[String],
    max: usize,
    rules: &Rules,
) -> Result<Vec<String>, String> {
    let nics: Vec<Nic> = candidates.iter().map(|name| candidate(topology, name)).collect();
    let pairing = pair_among(topology, &nics, &rules.limited_to(max))?;
    let all = || pairing.hosts.iter().chain(&pairing.gpus);
    let choice = match location {
        Location::Host => home_node(topology, &pairing.hosts, &cpus::allowed()),
        known => all().find(|c| c.location == known),
    };
    let choice = choice.ok_or_else(|| {
        let there: Vec<String> = targets(topology).iter().map(RailTarget::label).collect();
        let missing = match location {
            Location::Gpu(address) => format!("GPU at {address}"),
            Location::Node(id) => format!("NUMA node {id} with CPUs"),
            Location::Host => "NUMA node".to_owned(),
        };
        format!("there is no {missing} here, only {}", there.join(", "))
    })?;
    if choice.rails.is_empty() {
        let reasons: Vec<String> =
            pairing.left_out.iter().map(|l| format!("{}: {}", l.nic, l.reason)).collect();
        return Err(match reasons.is_empty() {
            true => format!("no device for {}: there are none", choice.name),
            false => format!("no device for {}: {}", choice.name, reasons.join("; ")),
        });
    }
    Ok(choice.rails.iter().map(|r| r.nic.clone()).collect())
}

/// The distance of each device from a location; `Unknown` if the location does not exist or may be
/// any of several NUMA nodes.
pub fn tiers(topology: &Topology, location: Location, devices: &[String]) -> Vec<Tier> {
    let targets = targets(topology);
    let mut named = targets.iter().filter(|s| match location {
        Location::Host => matches!(s.location, Location::Node(_)),
        known => s.location == known,
    });
    let target = named.next().filter(|_| named.next().is_none());
    let tier =
        |name: &String| target.map(|s| s.distance_to(topology, &candidate(topology, name)).tier);
    devices.iter().map(|d| tier(d).unwrap_or(Tier::Unknown)).collect()
}

/// The device that a transport named, as far as the topology knows it.
fn candidate(topology: &Topology, name: &str) -> Nic {
    if let Some(nic) = topology.nic(name) {
        return nic.clone();
    }
    let interface = topology.interfaces.iter().find(|i| i.name == name);
    Nic {
        pci: interface.and_then(|i| i.pci.clone()),
        numa: interface.and_then(|i| i.numa),
        ..without_location(name)
    }
}

fn without_location(name: &str) -> Nic {
    Nic {
        name: name.to_owned(),
        pci: None,
        software: false,
        numa: None,
        cpus: Vec::new(),
        port: Port { number: 1, link: LinkLayer::Other, state: "ACTIVE".into(), gbps: 0.0 },
        interfaces: Vec::new(),
        parent: None,
    }
}

/// The node that this process is confined to, or the one with the nearest and most rails.
fn home_node<'a>(
    topology: &Topology,
    hosts: &'a [RailChoice],
    allowed: &[usize],
) -> Option<&'a RailChoice> {
    let on = |choice: &&RailChoice| {
        let node = topology.nodes.iter().find(|n| choice.location == Location::Node(n.id));
        node.is_some_and(|n| n.cpus.iter().any(|cpu| allowed.contains(cpu)))
    };
    let mut mine = hosts.iter().filter(on);
    if let (Some(only), None) = (mine.next(), mine.next()) {
        return Some(only);
    }
    hosts.iter().min_by_key(|choice| {
        let nearest = choice.rails.iter().map(|r| r.distance.rank()).min();
        (nearest, Reverse(choice.rails.len()))
    })
}

/// A GPU or NUMA node that needs rails.
pub(super) struct RailTarget<'a> {
    location: Location,
    name: String,
    pci: Option<&'a PciLocation>,
    numa: Option<u32>,
}

impl RailTarget<'_> {
    /// Whether the target of a rule names it.
    pub fn matches_rule(&self, target: &str) -> bool {
        let matches = |name: &str| super::glob::matches(target, name);
        let kind = match self.location {
            Location::Gpu(address) => {
                target.parse() == Ok(address) || matches(&address.to_string())
            }
            _ => target == "host",
        };
        kind || matches(&self.name)
    }

    pub fn label(&self) -> String {
        match self.location {
            Location::Gpu(address) => format!("{} ({address})", self.name),
            _ => self.name.clone(),
        }
    }

    fn distance_to(&self, topology: &Topology, nic: &Nic) -> Distance {
        topology.distance((self.pci, self.numa), (nic.pci.as_ref(), nic.numa))
    }
}

impl Topology {
    pub fn gpu_to_nic(&self, gpu: &Gpu, nic: &Nic) -> Distance {
        self.distance((Some(&gpu.pci), gpu.numa), (nic.pci.as_ref(), nic.numa))
    }
}

fn targets(topology: &Topology) -> Vec<RailTarget<'_>> {
    let gpus = topology.gpus.iter().map(|g| RailTarget {
        location: Location::Gpu(g.pci.address),
        name: g.name.clone(),
        pci: Some(&g.pci),
        numa: g.numa,
    });
    // A node without CPUs is the memory of a GPU; no process runs there.
    let bare = topology.nodes.iter().all(|n| n.cpus.is_empty());
    let nodes = topology.nodes.iter().filter(|n| bare || !n.cpus.is_empty()).map(|n| RailTarget {
        location: Location::Node(n.id),
        name: format!("host{}", n.id),
        pci: None,
        numa: Some(n.id),
    });
    gpus.chain(nodes).collect()
}

fn pair_among(topology: &Topology, nics: &[Nic], rules: &Rules) -> Result<Pairing, String> {
    let targets = targets(topology);
    let mut names: Vec<String> = topology.nics.iter().map(|n| n.name.clone()).collect();
    names.extend(nics.iter().filter(|n| topology.nic(&n.name).is_none()).map(|n| n.name.clone()));
    rules.check(&targets, &names)?;
    let (usable, mut left_out) = usable(topology, nics, rules);
    let mut uses = vec![0; usable.len()];
    let mut choices: Vec<Option<RailChoice>> = Vec::new();
    for target in &targets {
        let ruled =
            rules.for_target(target).map(|rule| by_rule(topology, target, rule, nics, rules));
        let ruled = ruled.transpose()?;
        for rail in ruled.iter().filter(|_| target.pci.is_some()).flat_map(|c| &c.rails) {
            usable.iter().zip(&mut uses).for_each(|(n, u)| *u += usize::from(n.name == rail.nic));
        }
        choices.push(ruled);
    }
    let open = |i: &usize| choices[*i].is_none() && targets[*i].pci.is_some();
    let open: Vec<usize> = (0..targets.len()).filter(open).collect();
    let demands: Vec<Demand> =
        open.iter().map(|i| demand(topology, &targets[*i], &usable)).collect();
    let shares = share(&demands, &mut uses, rules.max_rails);
    for ((i, demand), share) in open.iter().zip(&demands).zip(&shares) {
        let reason = shared_reason(demand, share);
        choices[*i] = Some(choice(topology, &targets[*i], &usable, &share.rails, reason));
    }
    for (target, open) in targets.iter().zip(&mut choices).filter(|(_, c)| c.is_none()) {
        let demand = demand(topology, target, &usable);
        let rails = spread(&demand.nearest, rules.max_rails);
        let reason = found_reason(rails.len(), demand.nearest.len(), demand.distance);
        *open = Some(choice(topology, target, &usable, &rails, reason));
    }
    let choices: Vec<RailChoice> = choices.into_iter().flatten().collect();
    let used = |nic: &str| choices.iter().any(|c| c.rails.iter().any(|r| r.nic == nic));
    left_out.retain(|l| !used(&l.nic));
    for nic in usable.iter().filter(|n| !used(&n.name)) {
        let reason = format!(
            "not needed: it can't be shared evenly, or the GPUs and nodes near it have {} rails \
            already",
            rules.max_rails
        );
        left_out.push(UnusedNic { nic: nic.name.clone(), reason });
    }
    let is_gpu = |c: &RailChoice| matches!(c.location, Location::Gpu(_));
    let (gpus, hosts) = choices.into_iter().partition(is_gpu);
    Ok(Pairing { gpus, hosts, left_out })
}

fn by_rule(
    topology: &Topology,
    target: &RailTarget<'_>,
    rule: &Assignment,
    nics: &[Nic],
    rules: &Rules,
) -> Result<RailChoice, String> {
    let names: Vec<String> = nics.iter().map(|n| n.name.clone()).collect();
    let named = rule.select(&names);
    // A device named by the rule is kept even if a pattern excludes it.
    let kept = named.into_iter().filter(|n| rule.names(n) || !rules.excludes(n));
    let mut rails: Vec<Rail> = kept
        .filter_map(|name| nics.iter().find(|n| n.name == name))
        .map(|nic| Rail { nic: nic.name.clone(), distance: target.distance_to(topology, nic) })
        .collect();
    let mut reason = format!("the rule `{}`", rule.text);
    if rails.is_empty() {
        return Err(format!(
            "{reason} leaves no device for {}: its devices are excluded or can't be opened; \
            available: {}",
            target.name,
            names.join(", ")
        ));
    }
    if rails.len() > rules.max_rails {
        reason = format!("the nearest {} of {} by {reason}", rules.max_rails, rails.len());
        rails.sort_by_key(|r| r.distance.rank());
        rails.truncate(rules.max_rails);
    }
    Ok(RailChoice { location: target.location, name: target.name.clone(), rails, reason })
}

/// The usable NICs nearest to a target.
fn demand(topology: &Topology, target: &RailTarget<'_>, usable: &[&Nic]) -> Demand {
    let all: Vec<Distance> = usable.iter().map(|nic| target.distance_to(topology, nic)).collect();
    let nearest = all.iter().copied().min_by_key(|d| d.rank());
    let distance = nearest.unwrap_or_else(|| topology.distance((None, None), (None, None)));
    let near = (0..all.len()).filter(|i| all[*i].rank() == distance.rank());
    Demand { nearest: near.collect(), distance }
}

fn choice(
    topology: &Topology,
    target: &RailTarget<'_>,
    usable: &[&Nic],
    rails: &[usize],
    reason: String,
) -> RailChoice {
    let rail = |i: &usize| Rail {
        nic: usable[*i].name.clone(),
        distance: target.distance_to(topology, usable[*i]),
    };
    let (location, name) = (target.location, target.name.clone());
    RailChoice { location, name, rails: rails.iter().map(rail).collect(), reason }
}

fn shared_reason(demand: &Demand, share: &Share) -> String {
    let reason = found_reason(share.rails.len(), share.of, demand.distance);
    match share.gpus {
        0 | 1 => reason,
        n if n <= share.of => format!("{reason}, shared out evenly to {n} GPUs"),
        n => format!("{reason}, which {n} GPUs share"),
    }
}

fn found_reason(taken: usize, of: usize, distance: Distance) -> String {
    let relation = distance.tier.description();
    match (taken, of) {
        (0, _) => "no usable RDMA device".to_owned(),
        (1, 1) => format!("the only NIC {relation}"),
        (2, 2) => format!("both NICs {relation}"),
        (n, of) if n == of => format!("all {n} NICs {relation}"),
        (n, of) => format!("{n} of the {of} NICs {relation}"),
    }
}

#[cfg(test)]
mod tests {
    use super::{super::Node, *};

    #[test]
    fn the_home_node_is_the_confined_one_or_the_one_with_the_nearest_rails() {
        let pci = PciLocation::of(std::path::Path::new("pci0000:10/0000:10:00.0"));
        let nic = |name: &str, numa| Nic { pci: pci.clone(), numa, ..without_location(name) };
        let nics = vec![nic("a", Some(0)), nic("b", Some(1)), nic("c", Some(1))];
        let node = |id| Node { id, cpus: vec![id as usize], distances: Vec::new() };
        let topology = Topology { nodes: (0..3).map(node).collect(), nics, ..Default::default() };
        let pairing = pair(&topology, &Rules::default()).expect("no rules");
        let home_node =
            |cpus: &[usize]| home_node(&topology, &pairing.hosts, cpus).map(|c| c.name.as_str());
        assert_eq!(home_node(&[2]), Some("host2"), "confined to a node without rails of its own");
        assert_eq!(home_node(&[0, 1, 2]), Some("host1"), "near, and the most");
        assert_eq!(home_node(&[]), Some("host1"));
        let bare = pair(&Topology { nics: Vec::new(), ..topology.clone() }, &Rules::default());
        let bare = bare.expect("no rules").hosts;
        assert_eq!(super::home_node(&topology, &bare, &[]).map(|c| c.rails.len()), Some(0));
    }
}
