//! Division of the sends among source ranks that hold the same cells.

use fabric_kvcache::layout::CacheLayout;
use fabric_kvcache::pairing::Pairing;
use proptest::prelude::*;

use crate::caches::{cache, instance, Form, Head, Layer, Model, Page, Tensor, Token};
use crate::cases;
use crate::requests::instances;

fn groups(tensors: &[(&str, u32)]) -> Vec<(Model, Form)> {
    let tensors = tensors.iter().map(|&(name, heads)| (name.to_string(), heads, 4)).collect();
    let model =
        Model { name: "full".into(), layers: vec![0, 1], window: None, is_state: false, tensors };
    vec![(model, Form::dense(4, 8, [Layer, Tensor, Page, Head, Token]))]
}

fn ranks(heads: u32, ranks: u32) -> Vec<CacheLayout> {
    instance(&groups(&[("k", heads), ("v", heads)]), ranks)
}

fn paired(source: &[CacheLayout], target: &[CacheLayout]) -> Pairing {
    Pairing::new(source, target).unwrap()
}

/// How many target ranks each source rank serves.
fn load(pairing: &Pairing, salt: u64) -> Vec<usize> {
    (0..pairing.source_ranks()).map(|s| pairing.targets(s, salt).unwrap().len()).collect()
}

fn even(load: &[usize]) -> bool {
    load.iter().max().unwrap() - load.iter().min().unwrap() <= 1
}

#[test]
fn ranks_of_one_salt_serve_as_many_targets_of_a_replicated_cache() {
    for (sources, targets) in [(8, 8), (8, 3), (3, 8), (5, 1), (1, 5), (16, 64)] {
        let of = |ranks| instance(&groups(&[("latent", 1)]), ranks);
        let pairing = paired(&of(sources), &of(targets));
        for salt in 0..50 {
            let load = load(&pairing, salt);
            assert_eq!(load.iter().sum::<usize>(), targets as usize);
            assert!(even(&load), "{load:?} of {sources} ranks for {targets}");
        }
    }
}

#[test]
fn ranks_of_one_salt_serve_as_many_targets_where_heads_are_repeated() {
    for (heads, sources, targets) in [(4, 8, 8), (2, 8, 8), (4, 8, 4), (2, 4, 8), (4, 16, 8)] {
        let pairing = paired(&ranks(heads, sources), &ranks(heads, targets));
        for salt in 0..50 {
            assert!(even(&load(&pairing, salt)), "{:?}", load(&pairing, salt));
        }
    }
    // Two ranks hold the first half of the heads, two the second; each half is needed by two.
    let half = |rank: u32, of: u32| cache(&groups(&[("k", 4)]), |_| (rank / of * 2, 2));
    let source: Vec<CacheLayout> = (0..4).map(|r| half(r, 2)).collect();
    let pairing = paired(&source, &ranks_of_one_head());
    for salt in 0..50 {
        assert_eq!(load(&pairing, salt), [1, 1, 1, 1]);
    }
}

fn ranks_of_one_head() -> Vec<CacheLayout> {
    instance(&groups(&[("k", 4)]), 4)
}

/// Salts that are counted up, or that differ only in high bits, reach every replica about as often.
#[test]
fn salts_spread_requests_over_replicas() {
    let of = |ranks| instance(&groups(&[("latent", 1)]), ranks);
    let pairing = paired(&of(8), &of(1));
    for step in [1, 8, 1 << 20, 1 << 60] {
        let mut served = [0u32; 8];
        // Of salts 2^60 apart there are 16.
        let salts = if step == 1 << 60 { 16 } else { 4000 };
        for i in 0..salts {
            served[pairing.sources(0, i * step).unwrap()[0]] += 1;
        }
        let fair = salts as u32 / 8;
        let bounds = if salts == 16 { 0..=6 } else { fair * 8 / 10..=fair * 12 / 10 };
        assert!(served.iter().all(|n| bounds.contains(n)), "{served:?} in steps of {step}");
    }
}

#[test]
fn heads_that_one_rank_holds_alone_come_from_it() {
    let pairing = paired(&ranks(8, 4), &ranks(8, 8));
    for target in 0..8 {
        assert_eq!(pairing.sources(target, 99).unwrap(), [target / 2]);
    }
    let pairing = paired(&ranks(8, 8), &ranks(8, 2));
    assert_eq!(pairing.sources(1, 7).unwrap(), [4, 5, 6, 7]);
    assert!(pairing.link(0, 1, 7).unwrap().is_empty());
}

/// Both ends compute the choice, perhaps with different releases: it is part of the protocol.
#[test]
fn the_choice_is_the_documented_one() {
    let of = |ranks| instance(&groups(&[("latent", 1)]), ranks);
    let pairing = paired(&of(5), &of(2));
    let chosen = |salt| [0, 1].map(|t| pairing.sources(t, salt).unwrap()[0]);
    assert_eq!(chosen(0), [0, 1]);
    // SplitMix64's finaliser of 1 is 0x5692161d100b05e5, of 2 0xdbd238973a2b148a, of 2^64 - 1
    // 0xb4d055fcf2cbbd7b.
    assert_eq!(
        chosen(1),
        [0x5692_161d_100b_05e5_u64, 0x5692_161d_100b_05e6].map(|h| (h % 5) as usize)
    );
    assert_eq!(
        chosen(2),
        [0xdbd2_3897_3a2b_148a_u64, 0xdbd2_3897_3a2b_148b].map(|h| (h % 5) as usize)
    );
    assert_eq!(
        chosen(u64::MAX),
        [0xb4d0_55fc_f2cb_bd7b_u64, 0xb4d0_55fc_f2cb_bd7c].map(|h| (h % 5) as usize)
    );
}

proptest! {
    #![proptest_config(cases(300))]

    #[test]
    fn a_link_that_is_asked_for_again_is_the_same(of in instances(), salt in any::<u64>()) {
        let (source, target) = (of.source(), of.target());
        let (one, other) = (paired(&source, &target), paired(&source, &target));
        for s in 0..source.len() {
            for t in 0..target.len() {
                // Other salts fill what is kept.
                let _ = one.link(s, t, salt ^ 1).unwrap();
                let pages: Vec<u32> = (0..40).collect();
                let all = |pairing: &Pairing| {
                    let link = pairing.link(s, t, salt).unwrap();
                    let cells = pairing.cells(0, 0..3).unwrap();
                    let writes = link.writes(0, 0, cells, &pages, &pages).unwrap();
                    format!("{:?}", writes.collect::<Vec<_>>())
                };
                prop_assert_eq!(all(&one), all(&other));
            }
        }
    }
}
