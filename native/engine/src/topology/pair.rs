//! Chooses rails for each GPU and NUMA node, with reasons.

use std::cmp::Reverse;

use super::{
    cpus,
    rules::Assignment,
    share::{share, spread, Share, Want},
    usable::usable,
    Distance, Gpu, Link, Nic, PciAddress, Place, Port, Rules, Tier, Topology,
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

/// What [`pair()`] found: everything that has a NIC, might have one, or is one.
#[derive(Clone, Debug, PartialEq)]
pub struct Pairing {
    pub gpus: Vec<Choice>,
    /// For each NUMA node that has CPUs.
    pub hosts: Vec<Choice>,
    /// NICs that no GPU or node uses.
    pub left_out: Vec<LeftOut>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
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
pub struct LeftOut {
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
        Location::Host => home(topology, &pairing.hosts, &cpus::allowed()),
        known => all().find(|c| c.location == known),
    };
    let choice = choice.ok_or_else(|| {
        let there: Vec<String> = spots(topology).iter().map(Spot::shown).collect();
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
    let spots = spots(topology);
    let mut named = spots.iter().filter(|s| match location {
        Location::Host => matches!(s.location, Location::Node(_)),
        known => s.location == known,
    });
    let spot = named.next().filter(|_| named.next().is_none());
    let tier = |name: &String| spot.map(|s| s.to(topology, &candidate(topology, name)).tier);
    devices.iter().map(|d| tier(d).unwrap_or(Tier::Unknown)).collect()
}

/// The device that a transport named, as far as the topology knows it.
fn candidate(topology: &Topology, name: &str) -> Nic {
    if let Some(nic) = topology.nic(name) {
        return nic.clone();
    }
    let interface = topology.interfaces.iter().find(|i| i.name == name);
    Nic {
        place: interface.and_then(|i| i.place.clone()),
        numa: interface.and_then(|i| i.numa),
        ..placeless(name)
    }
}

fn placeless(name: &str) -> Nic {
    Nic {
        name: name.to_owned(),
        place: None,
        software: false,
        numa: None,
        cpus: Vec::new(),
        port: Port { number: 1, link: Link::Other, state: "ACTIVE".into(), gbps: 0.0 },
        interfaces: Vec::new(),
        parent: None,
    }
}

/// The node that this process is confined to, or the one with the nearest and most rails.
fn home<'a>(topology: &Topology, hosts: &'a [Choice], allowed: &[usize]) -> Option<&'a Choice> {
    let on = |choice: &&Choice| {
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
pub(super) struct Spot<'a> {
    location: Location,
    name: String,
    place: Option<&'a Place>,
    numa: Option<u32>,
}

impl Spot<'_> {
    /// Whether the target of a rule names it.
    pub fn is_named_by(&self, target: &str) -> bool {
        let matches = |name: &str| super::glob::matches(target, name);
        let kind = match self.location {
            Location::Gpu(address) => {
                target.parse() == Ok(address) || matches(&address.to_string())
            }
            _ => target == "host",
        };
        kind || matches(&self.name)
    }

    pub fn shown(&self) -> String {
        match self.location {
            Location::Gpu(address) => format!("{} ({address})", self.name),
            _ => self.name.clone(),
        }
    }

    fn to(&self, topology: &Topology, nic: &Nic) -> Distance {
        topology.distance((self.place, self.numa), (nic.place.as_ref(), nic.numa))
    }
}

impl Topology {
    pub fn gpu_to_nic(&self, gpu: &Gpu, nic: &Nic) -> Distance {
        self.distance((Some(&gpu.place), gpu.numa), (nic.place.as_ref(), nic.numa))
    }
}

fn spots(topology: &Topology) -> Vec<Spot<'_>> {
    let gpus = topology.gpus.iter().map(|g| Spot {
        location: Location::Gpu(g.place.address),
        name: g.name.clone(),
        place: Some(&g.place),
        numa: g.numa,
    });
    // A node without CPUs is the memory of a GPU; no process runs there.
    let bare = topology.nodes.iter().all(|n| n.cpus.is_empty());
    let nodes = topology.nodes.iter().filter(|n| bare || !n.cpus.is_empty()).map(|n| Spot {
        location: Location::Node(n.id),
        name: format!("host{}", n.id),
        place: None,
        numa: Some(n.id),
    });
    gpus.chain(nodes).collect()
}

fn pair_among(topology: &Topology, nics: &[Nic], rules: &Rules) -> Result<Pairing, String> {
    let spots = spots(topology);
    let mut names: Vec<String> = topology.nics.iter().map(|n| n.name.clone()).collect();
    names.extend(nics.iter().filter(|n| topology.nic(&n.name).is_none()).map(|n| n.name.clone()));
    rules.check(&spots, &names)?;
    let (usable, mut left_out) = usable(topology, nics, rules);
    let mut uses = vec![0; usable.len()];
    let mut choices: Vec<Option<Choice>> = Vec::new();
    for spot in &spots {
        let ruled = rules.for_spot(spot).map(|rule| by_rule(topology, spot, rule, nics, rules));
        let ruled = ruled.transpose()?;
        for rail in ruled.iter().filter(|_| spot.place.is_some()).flat_map(|c| &c.rails) {
            usable.iter().zip(&mut uses).for_each(|(n, u)| *u += usize::from(n.name == rail.nic));
        }
        choices.push(ruled);
    }
    let open = |i: &usize| choices[*i].is_none() && spots[*i].place.is_some();
    let open: Vec<usize> = (0..spots.len()).filter(open).collect();
    let wants: Vec<Want> = open.iter().map(|i| want(topology, &spots[*i], &usable)).collect();
    let shares = share(&wants, &mut uses, rules.max_rails);
    for ((i, want), share) in open.iter().zip(&wants).zip(&shares) {
        let reason = shared_reason(want, share);
        choices[*i] = Some(choice(topology, &spots[*i], &usable, &share.rails, reason));
    }
    for (spot, open) in spots.iter().zip(&mut choices).filter(|(_, c)| c.is_none()) {
        let want = want(topology, spot, &usable);
        let rails = spread(&want.nearest, rules.max_rails);
        let reason = found_reason(rails.len(), want.nearest.len(), want.distance);
        *open = Some(choice(topology, spot, &usable, &rails, reason));
    }
    let choices: Vec<Choice> = choices.into_iter().flatten().collect();
    let used = |nic: &str| choices.iter().any(|c| c.rails.iter().any(|r| r.nic == nic));
    left_out.retain(|l| !used(&l.nic));
    for nic in usable.iter().filter(|n| !used(&n.name)) {
        let reason = format!(
            "not needed: it can't be shared evenly, or the GPUs and nodes near it have {} rails \
            already",
            rules.max_rails
        );
        left_out.push(LeftOut { nic: nic.name.clone(), reason });
    }
    let is_gpu = |c: &Choice| matches!(c.location, Location::Gpu(_));
    let (gpus, hosts) = choices.into_iter().partition(is_gpu);
    Ok(Pairing { gpus, hosts, left_out })
}

fn by_rule(
    topology: &Topology,
    spot: &Spot<'_>,
    rule: &Assignment,
    nics: &[Nic],
    rules: &Rules,
) -> Result<Choice, String> {
    let names: Vec<String> = nics.iter().map(|n| n.name.clone()).collect();
    let named = rule.select(&names);
    // A device named by the rule is kept even if a pattern excludes it.
    let kept = named.into_iter().filter(|n| rule.names(n) || !rules.excludes(n));
    let mut rails: Vec<Rail> = kept
        .filter_map(|name| nics.iter().find(|n| n.name == name))
        .map(|nic| Rail { nic: nic.name.clone(), distance: spot.to(topology, nic) })
        .collect();
    let mut reason = format!("the rule `{}`", rule.text);
    if rails.is_empty() {
        return Err(format!(
            "{reason} leaves no device for {}: its devices are excluded or can't be opened; \
            available: {}",
            spot.name,
            names.join(", ")
        ));
    }
    if rails.len() > rules.max_rails {
        reason = format!("the nearest {} of {} by {reason}", rules.max_rails, rails.len());
        rails.sort_by_key(|r| r.distance.rank());
        rails.truncate(rules.max_rails);
    }
    Ok(Choice { location: spot.location, name: spot.name.clone(), rails, reason })
}

/// The usable NICs nearest to a target.
fn want(topology: &Topology, spot: &Spot<'_>, usable: &[&Nic]) -> Want {
    let all: Vec<Distance> = usable.iter().map(|nic| spot.to(topology, nic)).collect();
    let nearest = all.iter().copied().min_by_key(|d| d.rank());
    let distance = nearest.unwrap_or_else(|| topology.distance((None, None), (None, None)));
    let near = (0..all.len()).filter(|i| all[*i].rank() == distance.rank());
    Want { nearest: near.collect(), distance }
}

fn choice(
    topology: &Topology,
    spot: &Spot<'_>,
    usable: &[&Nic],
    rails: &[usize],
    reason: String,
) -> Choice {
    let rail =
        |i: &usize| Rail { nic: usable[*i].name.clone(), distance: spot.to(topology, usable[*i]) };
    let (location, name) = (spot.location, spot.name.clone());
    Choice { location, name, rails: rails.iter().map(rail).collect(), reason }
}

fn shared_reason(want: &Want, share: &Share) -> String {
    let reason = found_reason(share.rails.len(), share.of, want.distance);
    match share.gpus {
        0 | 1 => reason,
        n if n <= share.of => format!("{reason}, shared out evenly to {n} GPUs"),
        n => format!("{reason}, which {n} GPUs share"),
    }
}

fn found_reason(taken: usize, of: usize, distance: Distance) -> String {
    let place = distance.tier.words();
    match (taken, of) {
        (0, _) => "no usable RDMA device".to_owned(),
        (1, 1) => format!("the only NIC {place}"),
        (2, 2) => format!("both NICs {place}"),
        (n, of) if n == of => format!("all {n} NICs {place}"),
        (n, of) => format!("{n} of the {of} NICs {place}"),
    }
}

#[cfg(test)]
mod tests {
    use super::{super::Node, *};

    #[test]
    fn the_home_node_is_the_confined_one_or_the_one_with_the_nearest_rails() {
        let place = Place::of(std::path::Path::new("pci0000:10/0000:10:00.0"));
        let nic = |name: &str, numa| Nic { place: place.clone(), numa, ..placeless(name) };
        let nics = vec![nic("a", Some(0)), nic("b", Some(1)), nic("c", Some(1))];
        let node = |id| Node { id, cpus: vec![id as usize], distances: Vec::new() };
        let topology = Topology { nodes: (0..3).map(node).collect(), nics, ..Default::default() };
        let pairing = pair(&topology, &Rules::default()).expect("no rules");
        let home = |cpus: &[usize]| home(&topology, &pairing.hosts, cpus).map(|c| c.name.as_str());
        assert_eq!(home(&[2]), Some("host2"), "confined to a node without rails of its own");
        assert_eq!(home(&[0, 1, 2]), Some("host1"), "near, and the most");
        assert_eq!(home(&[]), Some("host1"));
        let bare = pair(&Topology { nics: Vec::new(), ..topology.clone() }, &Rules::default());
        let bare = bare.expect("no rules").hosts;
        assert_eq!(super::home(&topology, &bare, &[]).map(|c| c.rails.len()), Some(0));
    }
}
