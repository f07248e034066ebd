//! Devices, ports and GIDs, and why each is used or not.
//!
//! Reads sysfs only, so that it needs no device and works on recorded trees.

use std::{
    fs,
    net::Ipv6Addr,
    path::{Path, PathBuf},
};

use super::address::{gid_text, is_ipv4, Fabric};
use crate::{
    api::NicConfig, domain::DomainError, topology::matches_glob, transport::nics::nearest,
};

/// One entry of a port's GID table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GidReport {
    pub index: u8,
    /// As an IP address.
    pub address: String,
    /// "RoCE v2", "RoCE v1" or "InfiniBand".
    pub kind: &'static str,
    pub netdev: Option<String>,
    pub chosen: bool,
    /// Why it is or isn't chosen.
    pub why: String,
}

/// One port of one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceReport {
    pub device: String,
    pub port: u8,
    /// As in sysfs: "ACTIVE", "DOWN".
    pub state: String,
    /// "InfiniBand" or "Ethernet".
    pub link_layer: String,
    pub lid: u16,
    pub gids: Vec<GidReport>,
    pub chosen: bool,
    /// Why it is or isn't used.
    pub why: String,
}

/// A port to drive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ChosenPort {
    pub device: String,
    pub port: u8,
    pub fabric: Fabric,
    pub gid_index: u8,
    pub gid: [u8; 16],
    pub lid: u16,
    pub netdev: Option<String>,
}

/// The file name of the libibverbs that was opened, or why there is none.
pub fn version() -> Result<String, String> {
    fabric_sys::ibverbs::Ibverbs::get().map_err(|e| e.to_string())?;
    // The library does not report its version, but its file name has it.
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let paths = maps.lines().filter_map(|line| line.split_ascii_whitespace().nth(5));
    let file = paths.filter_map(|path| Path::new(path).file_name()?.to_str());
    let name = file.into_iter().find(|name| name.starts_with("libibverbs.so"));
    Ok(name.unwrap_or("libibverbs").to_owned())
}

/// All devices, ports and GIDs of this machine, and why each is used or not.
pub fn discover(config: &NicConfig) -> Vec<DeviceReport> {
    survey_machine(config).0
}

/// The reports of [`discover`], and the chosen ports in the order of the rails.
pub(super) fn survey_machine(config: &NicConfig) -> (Vec<DeviceReport>, Vec<ChosenPort>) {
    survey(Path::new("/sys/class/infiniband"), config, &|usable| nearest(usable, config))
}

/// Orders device names by preference, where the user names none.
type Prefer<'a> = &'a dyn Fn(&[String]) -> Result<Vec<String>, DomainError>;

fn survey(
    root: &Path,
    config: &NicConfig,
    prefer: Prefer<'_>,
) -> (Vec<DeviceReport>, Vec<ChosenPort>) {
    let mut found: Vec<(DeviceReport, Option<ChosenPort>)> = Vec::new();
    for device in sorted(root) {
        let ports = root.join(&device).join("ports");
        for port in sorted(&ports) {
            let Ok(number) = port.parse() else { continue };
            found.push(inspect_port(&ports.join(&port), &device, number, config));
        }
    }
    let mut left_out = "usable, but no name or pattern of `nics` matches it".to_owned();
    let order = if config.names.is_empty() {
        left_out = "usable, but other NICs are nearer to the engine's memory".into();
        let usable = found.iter().filter(|(_, c)| c.is_some()).map(|(r, _)| r.device.clone());
        let mut usable: Vec<String> = usable.collect();
        usable.dedup();
        match prefer(&usable) {
            Ok(names) => order(&found, &names),
            Err(e) => {
                left_out = e.to_string();
                Vec::new()
            }
        }
    } else {
        order(&found, &config.names)
    };
    let mut chosen = Vec::new();
    for i in order {
        let (report, candidate) = &mut found[i];
        let Some(c) = candidate.take() else { continue };
        if chosen.len() == config.max_rails.clamp(1, crate::api::MAX_RAILS) {
            report.why = format!("usable, but {} rails are in use already", chosen.len());
            continue;
        }
        report.chosen = true;
        report.why = format!("rail {}: {}", chosen.len(), report.why);
        chosen.push(c);
    }
    for (report, candidate) in &mut found {
        if candidate.is_some() {
            report.why.clone_from(&left_out);
        }
    }
    (found.into_iter().map(|(r, _)| r).collect(), chosen)
}

/// Indices of usable ports in the order of the patterns that match them.
fn order(found: &[(DeviceReport, Option<ChosenPort>)], patterns: &[String]) -> Vec<usize> {
    let mut order = Vec::new();
    for pattern in patterns {
        for (i, (report, candidate)) in found.iter().enumerate() {
            if candidate.is_some() && takes(pattern, report) && !order.contains(&i) {
                order.push(i);
            }
        }
    }
    order
}

/// Whether a pattern matches. Patterns name devices, or ports as `mlx5_0:1`.
fn takes(pattern: &str, report: &DeviceReport) -> bool {
    let with_port = format!("{}:{}", report.device, report.port);
    matches_glob(pattern, &report.device) || matches_glob(pattern, &with_port)
}

/// Patterns that match no device.
pub(super) fn unmatched_patterns<'a>(
    reports: &[DeviceReport],
    patterns: &'a [String],
) -> impl Iterator<Item = &'a str> {
    let idle = |p: &&String| !reports.iter().any(|r| takes(p, r));
    patterns.iter().filter(idle).map(String::as_str).collect::<Vec<_>>().into_iter()
}

fn sorted(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|e| e.file_name().to_string_lossy().into_owned())
        .collect();
    // Numeric order: mlx5_10 comes after mlx5_9.
    names.sort_by_key(|n| {
        let digits = n.len() - n.trim_end_matches(|c: char| c.is_ascii_digit()).len();
        let (stem, number) = n.split_at(n.len() - digits);
        (stem.to_owned(), number.parse::<u64>().unwrap_or(0))
    });
    names
}

fn read(path: PathBuf) -> Option<String> {
    fs::read_to_string(path).ok().map(|s| s.trim().to_owned())
}

fn inspect_port(
    at: &Path,
    device: &str,
    port: u8,
    config: &NicConfig,
) -> (DeviceReport, Option<ChosenPort>) {
    // "4: ACTIVE"
    let state = read(at.join("state")).unwrap_or_default();
    let state = state.split_once(": ").map_or(state.clone(), |(_, s)| s.to_owned());
    let link_layer = read(at.join("link_layer")).unwrap_or_default();
    let lid = read(at.join("lid")).unwrap_or_default();
    let lid = u16::from_str_radix(lid.trim_start_matches("0x"), 16).unwrap_or(0);
    let infiniband = link_layer == "InfiniBand";
    let mut gids = gids(at, infiniband);
    let mut report = DeviceReport {
        device: device.to_owned(),
        port,
        state,
        link_layer,
        lid,
        gids: Vec::new(),
        chosen: false,
        why: String::new(),
    };
    let pick = choose_gid(&mut gids, config.gid_index);
    let pick = pick.map(|i| (gids[i].0, gids[i].1.clone()));
    report.gids = gids.into_iter().map(|(_, g)| g).collect();
    report.why = match pick {
        _ if report.state != "ACTIVE" => {
            format!("the port is {}; see `ip link` or the subnet manager", report.state)
        }
        None if report.gids.is_empty() => {
            "the port has no GID; give its interface an address".into()
        }
        None => report
            .gids
            .iter()
            .map(|g| format!("GID {}: {}", g.index, g.why))
            .collect::<Vec<_>>()
            .join("; "),
        Some(_) if infiniband && lid == 0 => "the subnet manager has assigned no LID".into(),
        Some((gid, g)) => {
            let fabric = match g.kind {
                "InfiniBand" => Fabric::Infiniband,
                "RoCE v1" => Fabric::RoceV1,
                _ => Fabric::Roce,
            };
            report.why = format!("GID {} ({}, {})", g.index, g.kind, g.address);
            let chosen = ChosenPort {
                device: device.to_owned(),
                port,
                fabric,
                gid_index: g.index,
                gid,
                lid,
                netdev: g.netdev,
            };
            return (report, Some(chosen));
        }
    };
    (report, None)
}

type Gid = ([u8; 16], GidReport);

fn gids(at: &Path, infiniband: bool) -> Vec<Gid> {
    let mut all: Vec<Gid> = sorted(&at.join("gids"))
        .into_iter()
        .filter_map(|name| {
            let index: u8 = name.parse().ok()?;
            let gid = read(at.join("gids").join(&name))?.parse::<Ipv6Addr>().ok()?.octets();
            // Empty entries of the table read as zeros.
            (gid != [0; 16]).then_some(())?;
            let kind = match read(at.join("gid_attrs/types").join(&name)).as_deref() {
                _ if infiniband => "InfiniBand",
                Some("RoCE v2") => "RoCE v2",
                _ => "RoCE v1",
            };
            let netdev = read(at.join("gid_attrs/ndevs").join(&name));
            let (address, chosen, why) = (gid_text(&gid), false, String::new());
            Some((gid, GidReport { index, address, kind, netdev, chosen, why }))
        })
        .collect();
    all.sort_by_key(|(_, g)| g.index);
    all
}

/// Rank of a GID, lower is better, and the reason; `None` if the GID is unusable.
fn rank(gid: &[u8; 16], kind: &str) -> (Option<u8>, &'static str) {
    let link_local = gid[0] == 0xFE && gid[1] & 0xC0 == 0x80;
    match kind {
        "InfiniBand" => (Some(0), "the port's"),
        "RoCE v2" if is_ipv4(gid) => (Some(0), "IPv4: routed, and the usual choice"),
        "RoCE v2" if !link_local => (Some(1), "IPv6: routed"),
        "RoCE v2" => (Some(2), "link-local: reaches one Ethernet only"),
        _ => (None, "RoCE v1 is not routed; set gid_index to use it all the same"),
    }
}

fn netdev_exists(netdev: Option<&str>) -> bool {
    netdev.is_none_or(|n| Path::new("/sys/class/net").join(n).exists())
}

/// Marks the GID to use and gives a reason for each; returns its index in `gids`.
fn choose_gid(gids: &mut [Gid], asked: Option<u8>) -> Option<usize> {
    let best = match asked {
        Some(index) => gids.iter().position(|(_, g)| g.index == index),
        None => (0..gids.len())
            .filter(|i| rank(&gids[*i].0, gids[*i].1.kind).0.is_some())
            // An interface of another network namespace can't be used.
            .min_by_key(|i| {
                let (gid, report) = &gids[*i];
                (!netdev_exists(report.netdev.as_deref()), rank(gid, report.kind).0, report.index)
            }),
    };
    let better = best.map(|i| gids[i].1.index);
    for (i, (gid, g)) in gids.iter_mut().enumerate() {
        let (rank, words) = rank(gid, g.kind);
        g.chosen = best == Some(i);
        g.why = match (g.chosen, rank, asked, better) {
            (true, _, Some(_), _) => format!("asked for; {words}"),
            (true, ..) => words.to_owned(),
            (_, _, Some(asked), Some(_)) => format!("index {asked} was asked for"),
            (_, _, Some(asked), None) => format!("index {asked} was asked for and is empty"),
            (_, Some(_), None, Some(better)) => format!("{words}; {better} is preferred"),
            _ => words.to_owned(),
        };
    }
    best
}

/// All reports in one line, for errors.
pub(super) fn summary(reports: &[DeviceReport]) -> String {
    let each = reports.iter().map(|r| format!("{} port {}: {}", r.device, r.port, r.why));
    match reports.is_empty() {
        true => "no RDMA device on this machine (/sys/class/infiniband is empty)".into(),
        false => each.collect::<Vec<_>>().join("; "),
    }
}

#[cfg(all(test, not(loom)))]
#[path = "discover_tests.rs"]
mod tests;
