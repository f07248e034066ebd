//! Instances that are stages of a pipeline: what both have is paired, by kind and number.

use std::collections::BTreeMap;

use fabric_kvcache::layout::{CacheGroup, CacheLayout};
use fabric_kvcache::pairing::{Mismatch, Pairing};

use crate::caches::{instance, Dim, Form, Head, Layer, Model, Page, Tensor, Token};
use crate::replay::starts;

const TOKENS: u64 = 24;

/// The layers of each group of a stage.
type Groups = &'static [&'static [u32]];

/// A stage of `ranks` ranks, with groups of these layers of one kind.
fn stage(
    groups: &[&[u32]],
    ranks: u32,
    page_tokens: u32,
    order: [Dim; 5],
    is_stage: bool,
) -> Vec<CacheLayout> {
    let group = |layers: &&[u32]| {
        let tensors = ["k", "v"].map(|name| (name.to_string(), 4, 2)).to_vec();
        let model = Model {
            name: "attention".into(),
            layers: layers.to_vec(),
            window: None,
            is_state: false,
            tensors,
        };
        (model, Form::dense(page_tokens, 16, order))
    };
    let groups: Vec<(Model, Form)> = groups.iter().map(group).collect();
    let mut layouts = instance(&groups, ranks);
    layouts.iter_mut().for_each(|layout| layout.is_stage = is_stage);
    layouts
}

/// One table for each group; no two are alike.
fn tables(layout: &CacheLayout) -> Vec<Vec<u32>> {
    let of = |(g, group): (usize, &CacheGroup)| {
        let pages = group.pages_of(TOKENS) as u32;
        (0..pages).map(|page| (page * 7 + g as u32 * 3 + 1) % group.pages).collect()
    };
    layout.groups.iter().enumerate().map(of).collect()
}

/// What a byte of a cache is of: layer, tensor, head, token, byte of the row.
type Meaning = (u32, String, u32, u64, u64);

/// Of each byte of a request, by buffer and offset.
fn meanings(layout: &CacheLayout) -> BTreeMap<(u32, u64), Meaning> {
    let mut all = BTreeMap::new();
    for (group, table) in layout.groups.iter().zip(tables(layout)) {
        for tensor in &group.tensors {
            for (layer, place) in group.layers.iter().zip(&tensor.places) {
                for head in 0..tensor.held_heads {
                    for token in 0..TOKENS {
                        let (page, rest) = (
                            table[(token / u64::from(group.page_tokens)) as usize],
                            token % u64::from(group.page_tokens),
                        );
                        let row = place.offset
                            + u64::from(page) * tensor.page_stride
                            + u64::from(head) * tensor.head_stride
                            + rest * tensor.token_stride;
                        for byte in 0..tensor.row_bytes().unwrap() {
                            let name = tensor.name.clone();
                            let meaning = (*layer, name, tensor.first_head + head, token, byte);
                            all.insert((place.buffer, row + byte), meaning);
                        }
                    }
                }
            }
        }
    }
    all
}

/// Sends a request from all stages to a rank of one stage; what each byte there then means.
fn received(
    sources: &[Vec<CacheLayout>],
    target: &[CacheLayout],
    rank: usize,
) -> BTreeMap<(u32, u64), Meaning> {
    let mut got = BTreeMap::new();
    for source in sources {
        let pairing = Pairing::new(source, target).unwrap();
        let mut counted = 0;
        for (from, layout) in source.iter().enumerate() {
            let (link, meant) = (pairing.link(from, rank, 5).unwrap(), meanings(layout));
            for group in 0..pairing.groups() {
                let cells = pairing.cells(group, 0..TOKENS).unwrap();
                let (ours, theirs) = pairing.tables(group).unwrap();
                let (src, dst) = (&tables(layout)[ours], &tables(&target[rank])[theirs]);
                let selection = link.select(group, cells, src, dst).unwrap();
                for layer in 0..pairing.group(group).unwrap().1.len() {
                    for write in selection.writes(layer).unwrap() {
                        counted += write.count();
                        for (s, d) in
                            starts(&write.src_pages).into_iter().zip(starts(&write.dst_pages))
                        {
                            for i in 0..write.nbytes {
                                let meaning = meant[&(write.src_buffer, s + i)].clone();
                                let before = got.insert((write.dst_buffer, d + i), meaning);
                                assert_eq!(before, None, "a byte comes twice");
                            }
                        }
                    }
                }
            }
        }
        assert_eq!(counted, pairing.expected(rank, 5, 0..TOKENS).unwrap());
    }
    got
}

#[test]
fn each_layer_comes_from_the_stage_that_has_it_however_groups_divide_them() {
    let heads_first = [Layer, Tensor, Page, Head, Token];
    let tokens_first = [Page, Layer, Tensor, Token, Head];
    let whole: Groups = &[&[0, 2, 4, 6], &[1, 3, 5]];
    let (first, rest): (Groups, Groups) = (&[&[0, 1, 2]], &[&[3, 5], &[4, 6]]);
    let last: Groups = &[&[5, 6]];
    let middle: Groups = &[&[3, 4]];
    let cases: [(&[Groups], &[Groups]); 4] = [
        (&[first, rest], &[whole]),
        (&[whole], &[first, rest]),
        (&[first, rest], &[first, middle, last]),
        (&[first, middle, last], &[first, rest]),
    ];
    for (sources, targets) in cases {
        for (m, n) in [(1, 1), (2, 4), (4, 1)] {
            let is_stage = |all: &[Groups]| all.len() > 1;
            let source: Vec<_> =
                sources.iter().map(|s| stage(s, m, 4, heads_first, is_stage(sources))).collect();
            for target in targets {
                let target = stage(target, n, 8, tokens_first, is_stage(targets));
                for (rank, layout) in target.iter().enumerate() {
                    assert_eq!(received(&source, &target, rank), meanings(layout));
                }
            }
        }
    }
}

#[test]
fn a_layer_of_the_source_is_found_in_the_group_that_has_it() {
    let order = [Layer, Tensor, Page, Head, Token];
    let source = stage(&[&[0, 1, 2, 3]], 1, 4, order, false);
    let target = stage(&[&[2], &[1, 3]], 1, 4, order, true);
    let pairing = Pairing::new(&source, &target).unwrap();
    let found: Vec<_> = (0..5).map(|layer| pairing.of_source(0, layer)).collect();
    assert_eq!(found, [None, Some((1, 0)), Some((0, 0)), Some((1, 1)), None]);
    assert_eq!(pairing.of_source(1, 0), None);
    assert_eq!([0, 1].map(|group| pairing.tables(group).unwrap()), [(0, 0), (0, 1)]);
    assert!(pairing.tables(2).is_err());
}

#[test]
fn stages_without_a_layer_in_common_send_nothing() {
    let order = [Layer, Tensor, Page, Head, Token];
    let source = stage(&[&[0, 1]], 2, 4, order, true);
    let target = stage(&[&[2]], 2, 4, order, true);
    let pairing = Pairing::new(&source, &target).unwrap();
    assert_eq!(pairing.groups(), 0);
    assert_eq!(pairing.expected(1, 3, 0..TOKENS).unwrap(), 0);
    assert!(pairing.link(0, 1, 3).unwrap().is_empty() && pairing.sources(0, 3).unwrap().is_empty());
}

#[test]
fn what_stages_have_in_common_must_agree_and_only_stages_lack_layers() {
    let order = [Layer, Tensor, Page, Head, Token];
    let source = stage(&[&[0, 1]], 1, 4, order, true);
    let mut target = stage(&[&[1, 2]], 1, 4, order, true);
    target[0].groups[0].window = Some(8);
    target[0].groups[0].tensors[0].dtype = "int8".into();
    let Err(Mismatch::Differ(all)) = Pairing::new(&source, &target) else { panic!() };
    let said: Vec<String> = all.iter().map(ToString::to_string).collect();
    let (one, other) = ("(source rank 0)", "(target rank 0)");
    assert_eq!(
        said,
        [
            format!("group \"attention\", window: none {one}, 8 {other}"),
            format!("group \"attention\", tensor \"k\", dtype: uint8 {one}, int8 {other}"),
        ]
    );
    let (source, target) =
        (stage(&[&[0, 1]], 1, 4, order, false), stage(&[&[1]], 1, 4, order, false));
    assert!(matches!(Pairing::new(&source, &target), Err(Mismatch::Differ(_))));
}

#[test]
fn a_kind_has_each_layer_once() {
    let order = [Layer, Tensor, Page, Head, Token];
    let twice = stage(&[&[0, 1], &[1]], 1, 4, order, true).remove(0);
    let said = twice.check().unwrap_err().to_string();
    assert!(said.contains("layer \"1\" appears twice"), "{said}");
}
