//! Which NICs there are for libfabric, which of them an engine drives, and why not the others.

use super::{
    gpu,
    info::{self, Offer, OwnedInfo},
    library::{self, dotted, Api},
};
use crate::{
    api::{EngineConfig, NicConfig, MAX_RAILS},
    domain::DomainError,
    topology::matches_glob,
    transport::nics::nearest,
};

/// What is driven if nobody says otherwise: the others are no better than the engine's own tcp and
/// shm, or than its verbs.
const DEFAULT_PROVIDER: &str = "efa";

/// One thing that the library offers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    pub provider: String,
    pub fabric: String,
    /// The NIC, as libfabric calls it.
    pub domain: String,
    /// A PCI address, where the provider knows it.
    pub pci: Option<String>,
    /// Bits per second; 0 where the provider doesn't know.
    pub speed: u64,
    /// Whether the NIC places bytes by itself.
    pub rdma: bool,
    pub chosen: bool,
    /// Why it was, or was not.
    pub why: String,
}

/// The library's name and version, or why it can't be used.
pub fn version() -> Result<String, String> {
    let api = library::get().map_err(|e| e.to_string())?;
    Ok(format!("{} {}", api.library, dotted(api.found)))
}

/// All that the library offers to an engine with this configuration, chosen or not and why.
pub fn discover(config: &EngineConfig) -> Result<Vec<Found>, String> {
    // Providers initialise with the first question.
    fabric_sys::keep_signals(|| ask(config))
}

fn ask(config: &EngineConfig) -> Result<Vec<Found>, String> {
    let api = library::get().map_err(|e| e.to_string())?;
    let secret = config.token.as_ref().is_some_and(|t| !t.is_empty());
    let all = offers(&api, &config.nics);
    let verdicts = judge(&all, &config.nics, secret);
    let found = all.iter().zip(verdicts).map(|(info, verdict)| {
        let o = &info.offer;
        Found {
            provider: o.provider.clone(),
            fabric: o.fabric.clone(),
            domain: o.domain.clone(),
            pci: o.pci.clone(),
            speed: o.speed,
            rdma: o.is_rdma(),
            chosen: verdict.is_ok(),
            why: verdict.unwrap_or_else(|why| why),
        }
    });
    Ok(found.collect())
}

/// The NICs to drive, in the order of the rails.
pub(super) fn choose(
    api: &Api,
    nics: &NicConfig,
    secret: bool,
) -> Result<Vec<OwnedInfo>, DomainError> {
    let all = offers(api, nics);
    let near;
    let nics = match by_topology(&all, nics, secret)? {
        Some(names) => {
            near = NicConfig { names, ..nics.clone() };
            &near
        }
        None => nics,
    };
    let verdicts = judge(&all, nics, secret);
    let reasons = reasons(all.iter().map(|i| &i.offer).zip(&verdicts));
    let mut chosen: Vec<OwnedInfo> =
        all.into_iter().zip(verdicts).filter(|(_, v)| v.is_ok()).map(|(i, _)| i).collect();
    if chosen.is_empty() {
        let provider = nics.provider.as_deref().unwrap_or(DEFAULT_PROVIDER);
        let mut why =
            format!("libfabric {} has no usable NIC for provider {provider}", dotted(api.found));
        if reasons.is_empty() {
            why.push_str(": it offers none (fi_info lists what it has)");
        }
        return Err(DomainError::Unavailable(
            reasons.into_iter().fold(why, |why, reason| format!("{why}; {reason}")),
        ));
    }
    chosen.sort_by_key(|i| place_of(&i.offer, &nics.names));
    Ok(chosen)
}

/// Why the others are not driven, each reason once, with the first few that it holds for.
fn reasons<'a>(
    judged: impl Iterator<Item = (&'a Offer, &'a Result<String, String>)>,
) -> Vec<String> {
    let mut whom: Vec<(&str, Vec<String>)> = Vec::new();
    for (offer, verdict) in judged {
        let Err(why) = verdict else { continue };
        let name = format!("{} ({})", offer.domain, offer.provider);
        match whom.iter_mut().find(|(known, _)| known == why) {
            Some((_, names)) => names.push(name),
            None => whom.push((why, vec![name])),
        }
    }
    let said = |(why, names): (&str, Vec<String>)| {
        let more = names.len().saturating_sub(4);
        let and = if more > 0 { format!(" and {more} more") } else { String::new() };
        format!("{}{and}: {why}", names[..names.len() - more].join(", "))
    };
    whom.into_iter().map(said).collect()
}

/// The NICs nearest to what the engine serves, if it is for us to choose among hardware.
fn by_topology(
    all: &[OwnedInfo],
    nics: &NicConfig,
    secret: bool,
) -> Result<Option<Vec<String>>, DomainError> {
    let usable = |i: &&OwnedInfo| i.offer.is_rdma() && unusable(&i.offer, nics, secret).is_none();
    let mut domains: Vec<&str> =
        all.iter().filter(usable).map(|i| i.offer.domain.as_str()).collect();
    domains.dedup();
    if !nics.names.is_empty() || domains.is_empty() {
        return Ok(None);
    }
    let devices: Vec<String> = domains.iter().map(|d| device_of(d).to_owned()).collect();
    let chosen = nearest(&devices, nics)?;
    let of = |device: &String| domains.iter().find(|d| device_of(d) == device);
    Ok(Some(chosen.iter().filter_map(of).map(|d| (*d).to_owned()).collect()))
}

/// The RDMA device behind a domain: efa's are called `rdmap0s6-rdm`.
fn device_of(domain: &str) -> &str {
    let (device, kind) = domain.rsplit_once('-').unwrap_or((domain, ""));
    match kind {
        "rdm" | "dgrm" => device,
        _ => domain,
    }
}

/// What the configured provider offers, best first; without one, what all offer.
fn offers(api: &Api, nics: &NicConfig) -> Vec<OwnedInfo> {
    let provider = nics.provider.as_deref().unwrap_or(DEFAULT_PROVIDER);
    let mut all = Vec::new();
    if gpu::are_there() {
        // First, so that of two entries for a NIC it is this one. Software would copy by itself what
        // is better staged.
        all = info::query(api, Some(provider), true).unwrap_or_default();
        all.retain(|i| i.offer.hmem && i.offer.is_rdma());
    }
    all.extend(info::query(api, Some(provider), false).unwrap_or_default());
    if all.is_empty() && nics.provider.is_none() {
        // Not driven, but named: whoever wonders why sees what there is.
        all = info::query(api, None, false).unwrap_or_default();
    }
    let rank = |o: &Offer| {
        (o.provider != provider, o.fabric != "efa-direct", o.is_link_local(), o.addr_format)
    };
    all.sort_by_key(|i| rank(&i.offer));
    let mut seen = Vec::new();
    // Entries that differ in what is not used here.
    all.retain(|i| {
        let o = &i.offer;
        let name = (o.provider.clone(), o.fabric.clone(), o.domain.clone(), o.source.clone());
        let fresh = !seen.contains(&name);
        if fresh {
            seen.push(name);
        }
        fresh
    });
    all
}

/// For each offer: why it is driven, or why not.
fn judge(all: &[OwnedInfo], nics: &NicConfig, secret: bool) -> Vec<Result<String, String>> {
    let offers: Vec<&Offer> = all.iter().map(|i| &i.offer).collect();
    verdicts(&offers, nics, secret)
}

fn verdicts(offers: &[&Offer], nics: &NicConfig, secret: bool) -> Vec<Result<String, String>> {
    let mut taken: Vec<&str> = Vec::new();
    let most = nics.max_rails.clamp(1, MAX_RAILS);
    // Loopback interfaces are driven where nothing else is, or by name.
    let only_local = offers.iter().all(|o| unusable(o, nics, secret).is_some() || o.is_local());
    let mut order: Vec<usize> = (0..offers.len()).collect();
    order.sort_by_key(|i| place_of(offers[*i], &nics.names));
    let mut verdicts = vec![Err(String::new()); offers.len()];
    for i in order {
        let o = offers[i];
        verdicts[i] = match unusable(o, nics, secret) {
            Some(why) => Err(why),
            None if nics.names.is_empty() && o.is_local() && !only_local => {
                Err("it does not leave this host; name it to use it".into())
            }
            None if taken.contains(&o.domain.as_str()) => {
                Err("another entry for the same NIC is used".into())
            }
            None if taken.len() >= most => Err(format!("{most} rails are taken by others")),
            None if !taken.is_empty() && o.provider.contains("ofi_rxm") && o.is_rdma() => Err(
                "ofi_rxm up to libfabric 2.6 can crash a process in which connections of several \
                 NICs close: one rail only; verbs drives several"
                    .into(),
            ),
            None => {
                taken.push(&o.domain);
                Ok(match nics.names.is_empty() {
                    true => format!("usable, rail {}", taken.len() - 1),
                    false => format!("named in the configuration, rail {}", taken.len() - 1),
                })
            }
        };
    }
    verdicts
}

/// Where its name stands in the configuration.
fn place_of(o: &Offer, names: &[String]) -> usize {
    names.iter().position(|n| matches_glob(n, &o.domain)).unwrap_or(names.len())
}

fn unusable(o: &Offer, nics: &NicConfig, secret: bool) -> Option<String> {
    use fabric_sys::libfabric::{mode, mr_mode};
    let provider = nics.provider.as_deref().unwrap_or(DEFAULT_PROVIDER);
    let layered = |p: &str| p == provider || p.split(';').next() == Some(provider);
    if !layered(&o.provider) {
        return Some(format!("provider {provider} is wanted; libfabric_provider names another"));
    }
    if !nics.names.is_empty() && !nics.names.iter().any(|n| matches_glob(n, &o.domain)) {
        return Some(format!("not among the NICs named: {}", nics.names.join(", ")));
    }
    if o.cq_data_bytes < 4 {
        return Some(format!("its immediates have {} bytes, counters need 4", o.cq_data_bytes));
    }
    if o.mr_mode & mr_mode::RAW != 0 {
        return Some("its memory keys are of the raw kind, which is not supported".into());
    }
    let odd = o.mode & !(mode::CONTEXT | mode::CONTEXT2 | mode::RX_CQ_DATA);
    if odd != 0 {
        return Some(format!("it asks for modes that are not supported here ({odd:#x})"));
    }
    if o.down {
        return Some("its link is down".into());
    }
    if !secret && !o.is_local() {
        return Some(
            "without a token whoever reaches it could write to this engine's memory; give all \
             engines the same token"
                .into(),
        );
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(provider: &str, fabric: &str, domain: &str) -> Offer {
        Offer {
            provider: provider.into(),
            fabric: fabric.into(),
            domain: domain.into(),
            cq_data_bytes: 4,
            ..Default::default()
        }
    }

    #[test]
    fn efa_alone_is_driven_unless_asked_and_the_rest_is_told_why() {
        let all = [
            offer("efa", "efa-direct", "rdmap0"),
            offer("efa", "efa", "rdmap0"),
            offer("efa", "efa", "rdmap1"),
            offer("tcp;ofi_rxm", "10.0.0.0/8", "eth0"),
        ];
        let all: Vec<&Offer> = all.iter().collect();
        let nics = NicConfig::default();
        let v = verdicts(&all, &nics, true);
        assert!(v[0].is_ok() && v[2].is_ok());
        assert!(v[1].as_ref().unwrap_err().contains("same NIC"));
        assert!(v[3].as_ref().unwrap_err().contains("libfabric_provider"));
        let one = NicConfig { max_rails: 1, ..NicConfig::default() };
        assert!(verdicts(&all, &one, true)[2].as_ref().unwrap_err().contains("1 rails"));
        let named = NicConfig { names: vec!["*1".into(), "rdmap0".into()], ..one };
        let v = verdicts(&all, &named, true);
        assert!(v[0].is_err() && v[2].is_ok(), "{v:?}");
        let layered = [
            offer("verbs;ofi_rxm", "10.0.0.0/8", "rxe0"),
            offer("verbs;ofi_rxm", "10.0.1.0/8", "rxe1"),
        ];
        let by_verbs = NicConfig { provider: Some("verbs;ofi_rxm".into()), ..NicConfig::default() };
        let v = verdicts(&layered.iter().collect::<Vec<_>>(), &by_verbs, true);
        assert!(v[0].is_ok() && v[1].as_ref().unwrap_err().contains("one rail only"), "{v:?}");
        let without_token = verdicts(&all, &nics, false);
        assert!(without_token[0].as_ref().unwrap_err().contains("token"));
    }

    #[test]
    fn what_an_offer_lacks_is_said_in_words() {
        let nics = NicConfig::default();
        let small = Offer { cq_data_bytes: 2, ..offer("efa", "efa", "a") };
        let raw = Offer { mr_mode: 1 << 3, ..offer("efa", "efa", "b") };
        let odd = Offer { mode: 1 << 51, ..offer("efa", "efa", "c") };
        let down = Offer { down: true, ..offer("efa", "efa", "d") };
        let v = verdicts(&[&small, &raw, &odd, &down], &nics, true);
        for (verdict, word) in v.iter().zip(["2 bytes", "raw", "modes", "down"]) {
            assert!(verdict.as_ref().unwrap_err().contains(word), "{verdict:?}");
        }
    }
}
