//! NICs that libfabric offers, and why each is used or not.

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

/// Default provider. The others are no better than the engine's own tcp, shm and verbs transports.
const DEFAULT_PROVIDER: &str = "efa";

/// One entry that the library offers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NicReport {
    pub provider: String,
    pub fabric: String,
    /// The NIC's name in libfabric.
    pub domain: String,
    /// PCI address, if the provider knows it.
    pub pci: Option<String>,
    /// Bits per second; 0 if the provider does not know.
    pub speed: u64,
    /// Whether the NIC places bytes by itself.
    pub rdma: bool,
    pub chosen: bool,
    /// Why it is or isn't used.
    pub why: String,
}

/// The library's name and version, or why it can't be used.
pub fn version() -> Result<String, String> {
    let api = library::get().map_err(|e| e.to_string())?;
    Ok(format!("{} {}", api.library, dotted(api.found)))
}

/// Everything that the library offers for this configuration, and why each entry is used or not.
pub fn discover(config: &EngineConfig) -> Result<Vec<NicReport>, String> {
    // Providers initialise with the first query.
    fabric_sys::keep_signals(|| query_nics(config))
}

fn query_nics(config: &EngineConfig) -> Result<Vec<NicReport>, String> {
    let api = library::get().map_err(|e| e.to_string())?;
    let secret = config.token.as_ref().is_some_and(|t| !t.is_empty());
    let all = offers(&api, &config.nics);
    let assessments = assess(&all, &config.nics, secret);
    let found = all.iter().zip(assessments).map(|(info, answer)| {
        let o = &info.offer;
        NicReport {
            provider: o.provider.clone(),
            fabric: o.fabric.clone(),
            domain: o.domain.clone(),
            pci: o.pci.clone(),
            speed: o.speed,
            rdma: o.is_rdma(),
            chosen: answer.is_ok(),
            why: answer.unwrap_or_else(|why| why),
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
    let assessments = assess(&all, nics, secret);
    let reasons = reasons(all.iter().map(|i| &i.offer).zip(&assessments));
    let mut chosen: Vec<OwnedInfo> =
        all.into_iter().zip(assessments).filter(|(_, v)| v.is_ok()).map(|(i, _)| i).collect();
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
    chosen.sort_by_key(|i| pattern_index(&i.offer, &nics.names));
    Ok(chosen)
}

/// Why entries are not used: each reason once, with the first few entries that it holds for.
fn reasons<'a>(
    on_access_answer: impl Iterator<Item = (&'a Offer, &'a Result<String, String>)>,
) -> Vec<String> {
    let mut initiator: Vec<(&str, Vec<String>)> = Vec::new();
    for (offer, answer) in on_access_answer {
        let Err(why) = answer else { continue };
        let name = format!("{} ({})", offer.domain, offer.provider);
        match initiator.iter_mut().find(|(known, _)| known == why) {
            Some((_, names)) => names.push(name),
            None => initiator.push((why, vec![name])),
        }
    }
    let said = |(why, names): (&str, Vec<String>)| {
        let more = names.len().saturating_sub(4);
        let and = if more > 0 { format!(" and {more} more") } else { String::new() };
        format!("{}{and}: {why}", names[..names.len() - more].join(", "))
    };
    initiator.into_iter().map(said).collect()
}

/// Prefers the NICs nearest to the engine's memory, if the user names none.
fn by_topology(
    all: &[OwnedInfo],
    nics: &NicConfig,
    secret: bool,
) -> Result<Option<Vec<String>>, DomainError> {
    let usable =
        |i: &&OwnedInfo| i.offer.is_rdma() && unusable_reason(&i.offer, nics, secret).is_none();
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

/// The RDMA device of a domain; efa's domains have names such as `rdmap0s6-rdm`.
fn device_of(domain: &str) -> &str {
    let (device, kind) = domain.rsplit_once('-').unwrap_or((domain, ""));
    match kind {
        "rdm" | "dgrm" => device,
        _ => domain,
    }
}

/// The entries of the configured provider, best first; without one, of all providers.
fn offers(api: &Api, nics: &NicConfig) -> Vec<OwnedInfo> {
    let provider = nics.provider.as_deref().unwrap_or(DEFAULT_PROVIDER);
    let mut all = Vec::new();
    if gpu::may_exist() {
        // First, so that this entry wins among several for a NIC. A software provider would copy by
        // itself what is better staged.
        all = info::query(api, Some(provider), true).unwrap_or_default();
        all.retain(|i| i.offer.hmem && i.offer.is_rdma());
    }
    all.extend(info::query(api, Some(provider), false).unwrap_or_default());
    if all.is_empty() && nics.provider.is_none() {
        // Listed but not used, so that reports show them.
        all = info::query(api, None, false).unwrap_or_default();
    }
    let rank = |o: &Offer| {
        (o.provider != provider, o.fabric != "efa-direct", o.is_link_local(), o.addr_format)
    };
    all.sort_by_key(|i| rank(&i.offer));
    let mut seen = Vec::new();
    // Removes entries that differ only in unused attributes.
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

/// For each offer: why it is used, or why not.
fn assess(all: &[OwnedInfo], nics: &NicConfig, secret: bool) -> Vec<Result<String, String>> {
    let offers: Vec<&Offer> = all.iter().map(|i| &i.offer).collect();
    assessments(&offers, nics, secret)
}

fn assessments(offers: &[&Offer], nics: &NicConfig, secret: bool) -> Vec<Result<String, String>> {
    let mut taken: Vec<&str> = Vec::new();
    let most = nics.max_rails.clamp(1, MAX_RAILS);
    // Loopback interfaces are used if there is nothing else, or by name.
    let only_local =
        offers.iter().all(|o| unusable_reason(o, nics, secret).is_some() || o.is_local());
    let mut order: Vec<usize> = (0..offers.len()).collect();
    order.sort_by_key(|i| pattern_index(offers[*i], &nics.names));
    let mut assessments = vec![Err(String::new()); offers.len()];
    for i in order {
        let o = offers[i];
        assessments[i] = match unusable_reason(o, nics, secret) {
            Some(why) => Err(why),
            None if nics.names.is_empty() && o.is_local() && !only_local => {
                Err("it reaches this host only; set its name in `nics` to use it".into())
            }
            None if taken.contains(&o.domain.as_str()) => {
                Err("another entry for the same NIC is used".into())
            }
            None if taken.len() >= most => Err(format!("all {most} rails are in use")),
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
    assessments
}

/// Index of the pattern that names it in the configuration.
fn pattern_index(o: &Offer, names: &[String]) -> usize {
    names.iter().position(|n| matches_glob(n, &o.domain)).unwrap_or(names.len())
}

fn unusable_reason(o: &Offer, nics: &NicConfig, secret: bool) -> Option<String> {
    use fabric_sys::libfabric::{mode, mr_mode};
    let provider = nics.provider.as_deref().unwrap_or(DEFAULT_PROVIDER);
    let layered = |p: &str| p == provider || p.split(';').next() == Some(provider);
    if !layered(&o.provider) {
        return Some(format!(
            "the provider in use is {provider}; set libfabric_provider to use another"
        ));
    }
    if !nics.names.is_empty() && !nics.names.iter().any(|n| matches_glob(n, &o.domain)) {
        return Some(format!("not among the NICs named: {}", nics.names.join(", ")));
    }
    if o.cq_data_bytes < 4 {
        return Some(format!("its immediates have {} bytes, expected 4", o.cq_data_bytes));
    }
    if o.mr_mode & mr_mode::RAW != 0 {
        return Some("it uses raw memory keys, which are not supported".into());
    }
    let odd = o.mode & !(mode::CONTEXT | mode::CONTEXT2 | mode::RX_CQ_DATA);
    if odd != 0 {
        return Some(format!("it requires unsupported modes ({odd:#x})"));
    }
    if o.down {
        return Some("its link is down".into());
    }
    if !secret && !o.is_local() {
        return Some(
            "without a token every process that reaches it could write to this engine's memory; \
            give all engines the same token"
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
    fn efa_alone_is_used_by_default_and_the_rest_has_reasons() {
        let all = [
            offer("efa", "efa-direct", "rdmap0"),
            offer("efa", "efa", "rdmap0"),
            offer("efa", "efa", "rdmap1"),
            offer("tcp;ofi_rxm", "10.0.0.0/8", "eth0"),
        ];
        let all: Vec<&Offer> = all.iter().collect();
        let nics = NicConfig::default();
        let v = assessments(&all, &nics, true);
        assert!(v[0].is_ok() && v[2].is_ok());
        assert!(v[1].as_ref().unwrap_err().contains("same NIC"));
        assert!(v[3].as_ref().unwrap_err().contains("libfabric_provider"));
        let one = NicConfig { max_rails: 1, ..NicConfig::default() };
        assert!(assessments(&all, &one, true)[2].as_ref().unwrap_err().contains("1 rails"));
        let named = NicConfig { names: vec!["*1".into(), "rdmap0".into()], ..one };
        let v = assessments(&all, &named, true);
        assert!(v[0].is_err() && v[2].is_ok(), "{v:?}");
        let layered = [
            offer("verbs;ofi_rxm", "10.0.0.0/8", "rxe0"),
            offer("verbs;ofi_rxm", "10.0.1.0/8", "rxe1"),
        ];
        let by_verbs = NicConfig { provider: Some("verbs;ofi_rxm".into()), ..NicConfig::default() };
        let v = assessments(&layered.iter().collect::<Vec<_>>(), &by_verbs, true);
        assert!(v[0].is_ok() && v[1].as_ref().unwrap_err().contains("one rail only"), "{v:?}");
        let without_token = assessments(&all, &nics, false);
        assert!(without_token[0].as_ref().unwrap_err().contains("token"));
    }

    #[test]
    fn an_unusable_offer_names_the_missing_features() {
        let nics = NicConfig::default();
        let small = Offer { cq_data_bytes: 2, ..offer("efa", "efa", "a") };
        let raw = Offer { mr_mode: 1 << 3, ..offer("efa", "efa", "b") };
        let odd = Offer { mode: 1 << 51, ..offer("efa", "efa", "c") };
        let down = Offer { down: true, ..offer("efa", "efa", "d") };
        let v = assessments(&[&small, &raw, &odd, &down], &nics, true);
        for (answer, word) in v.iter().zip(["2 bytes", "raw", "modes", "down"]) {
            assert!(answer.as_ref().unwrap_err().contains(word), "{answer:?}");
        }
    }
}
