//! Instances that don't fit, and requests that can't be: refused with every reason.

use fabric_kvcache::layout::CacheLayout;
use fabric_kvcache::pairing::{Mismatch, Pairing, RequestError, Side};

use crate::caches::{cache, instance, Form, Head, Layer, Model, Page, Tensor, Token};

fn full() -> (Model, Form) {
    let tensors = ["k", "v"].map(|name| (name.to_string(), 4, 4)).to_vec();
    let model = Model {
        name: "full".into(),
        layers: vec![0, 1, 2, 5],
        window: None,
        is_state: false,
        tensors,
    };
    (model, Form::dense(8, 10, [Layer, Tensor, Page, Head, Token]))
}

fn sliding() -> (Model, Form) {
    let (mut model, form) = full();
    model.name = "sliding".into();
    model.layers = vec![3, 4];
    model.window = Some(20);
    (model, form)
}

fn ranks(count: u32) -> Vec<CacheLayout> {
    instance(&[full(), sliding()], count)
}

fn differences(change: impl Fn(&mut CacheLayout)) -> Vec<String> {
    let mut target = ranks(2);
    target.iter_mut().for_each(change);
    match Pairing::new(&ranks(4), &target) {
        Err(Mismatch::Differ(all)) => all.iter().map(ToString::to_string).collect(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_field_that_differs_is_listed_with_both_values() {
    let said = differences(|l| {
        l.model = "n".into();
        let group = &mut l.groups[0];
        group.layers[3] = 6;
        group.tensors[0].width = 2;
        group.tensors[1].dtype = "float8_e5m2".into();
        l.groups[1].window = None;
        l.groups[1].tensors[1].name = "w".into();
    });
    let (one, other) = ("(source rank 0)", "(target rank 0)");
    assert_eq!(
        said,
        [
            format!("model: \"m\" {one}, \"n\" {other}"),
            format!("group \"full\", layers: 0-2, 5 {one}, 0-2, 6 {other}"),
            format!("group \"full\", tensor \"k\", width: 4 {one}, 2 {other}"),
            format!("group \"full\", tensor \"v\", dtype: uint8 {one}, float8_e5m2 {other}"),
            format!("group \"sliding\", window: 20 {one}, none {other}"),
            format!("group \"sliding\", tensors: [\"k\", \"v\"] {one}, [\"k\", \"w\"] {other}"),
        ]
    );
}

#[test]
fn heads_of_the_model_and_groups_must_agree() {
    let said = differences(|l| l.groups.iter_mut().for_each(|g| g.tensors[0].heads = 5));
    assert_eq!(
        said[0],
        "group \"full\", tensor \"k\", heads: 4 (source rank 0), 5 (target rank 0)"
    );
    let said = differences(|l| l.groups.reverse());
    assert_eq!(
        said,
        ["groups: [\"full\", \"sliding\"] (source rank 0), [\"sliding\", \"full\"] (target rank 0)"]
    );
    let said = differences(|l| drop(l.groups.pop()));
    assert_eq!(
        said,
        ["groups: [\"full\", \"sliding\"] (source rank 0), [\"full\"] (target rank 0)"]
    );
}

#[test]
fn ranks_of_one_instance_must_agree_with_each_other() {
    let mut source = ranks(4);
    source[2].groups[0].page_tokens = 4;
    let Err(Mismatch::Differ(all)) = Pairing::new(&source, &ranks(1)) else { panic!() };
    assert_eq!(
        all[0].to_string(),
        "group \"full\", page_tokens: 8 (source rank 0), 4 (source rank 2)"
    );
    assert_eq!(all.len(), 1);
}

#[test]
fn heads_that_no_rank_holds_are_listed() {
    let mut source = ranks(4);
    source.remove(2);
    let Err(Mismatch::Differ(all)) = Pairing::new(&source, &ranks(1)) else { panic!() };
    assert_eq!(all.len(), 4, "keys and values of two groups");
    assert_eq!(
        all[1].to_string(),
        "group \"full\", tensor \"v\", held heads: 0-1, 3 (all source ranks together), 0-3 (the model)"
    );
    let said = Mismatch::Differ(all).to_string();
    assert!(said.ends_with("; start both ends with the same model and cache"), "{said}");
    assert!(matches!(Pairing::new(&ranks(1), &source), Err(Mismatch::Differ(_))));
}

#[test]
fn what_may_differ_is_accepted() {
    let (model, _) = full();
    let mut form = Form::dense(3, 99, [Page, Token, Layer, Head, Tensor]);
    (form.reversed, form.gaps) = (true, vec![1; 5]);
    let target = instance(&[(model, form)], 3);
    Pairing::new(&instance(&[full()], 4), &target).unwrap();
}

#[test]
fn a_broken_layout_is_refused_with_its_rank() {
    let mut target = ranks(4);
    target[3].groups[1].tensors[0].places[1].offset = 1 << 40;
    let said = Pairing::new(&ranks(2), &target).unwrap_err().to_string();
    let start = "target rank 3: cache layout, group \"sliding\", tensor \"k\", layer 4: ";
    assert!(said.starts_with(start), "{said}");
    let no_ranks = Pairing::new(&[], &target).unwrap_err();
    assert_eq!(no_ranks, Mismatch::Ranks { side: Side::Source, count: 0 });
}

#[test]
fn page_sizes_that_cut_too_finely_are_refused() {
    let model = Model {
        name: "g".into(),
        layers: vec![0],
        window: None,
        is_state: false,
        tensors: vec![("k".into(), 64, 1)],
    };
    let form = |tokens| Form::dense(tokens, 1, [Layer, Tensor, Page, Token, Head]);
    let side = |tokens, order: Form| {
        cache(&[(model.clone(), Form { page_tokens: tokens, ..order })], |h| (0, h))
    };
    let heads_first = Form::dense(1, 1, [Layer, Tensor, Page, Head, Token]);
    let said = Pairing::new(&[side(4095, form(1))], &[side(4096, heads_first)]).unwrap_err();
    assert!(
        matches!(said, Mismatch::TooFine { source_page: 4095, target_page: 4096, .. }),
        "{said}"
    );
    // Heads first takes a run for each cell and head, and there are 131,070 cells.
    let dense = |tokens| side(tokens, Form::dense(1, 1, [Layer, Tensor, Page, Head, Token]));
    let said = Pairing::new(&[dense(65_535)], &[dense(65_536)]).unwrap_err();
    assert!(matches!(said, Mismatch::TooFine { runs: 8_388_480, .. }), "{said}");
    Pairing::new(&[dense(32_768)], &[dense(65_536)]).unwrap();
}

fn pairing() -> Pairing {
    let (model, mut form) = full();
    form.page_tokens = 12;
    Pairing::new(&ranks(2)[..], &instance(&[(model, form), sliding()], 2)).unwrap()
}

#[test]
fn a_prefix_is_whole_pages_of_the_target() {
    let said = pairing().cells(0, 8..40).unwrap_err();
    assert_eq!(said, RequestError::PartPage { group: "full".into(), have: 8, page_tokens: 12 });
    #[expect(clippy::reversed_empty_ranges)]
    let more_than_there_is = pairing().cells(0, 41..40);
    assert!(more_than_there_is.is_err());
    assert!(pairing().expected(0, 0, 8..40).is_err());
    // A decoder that has everything needs nothing.
    assert!(pairing().cells(0, 40..40).unwrap().is_empty());
    assert_eq!(pairing().expected(0, 0, 40..40).unwrap(), 0);
    assert!(pairing().cells(0, 0..u64::MAX).is_err());
    assert!(pairing().ready(0, 3, 2).is_err());
}

#[test]
fn tables_are_checked_before_anything_is_sent() {
    let pairing = pairing();
    let link = pairing.link(0, 0, 0).unwrap();
    // 40 tokens: 5 pages of 8, 4 pages of 12.
    let cells = pairing.cells(0, 0..40).unwrap();
    let (src, dst) = ([9, 3, 1, 0, 7], [2, 8, 0, 1]);
    link.select(0, cells.clone(), &src, &dst).unwrap();
    let short = link.select(0, cells.clone(), &src[..4], &dst).unwrap_err().to_string();
    assert!(short.contains("source's page table of group \"full\" has 4 entries but 5"), "{short}");
    let short = link.select(0, cells.clone(), &src, &dst[..3]).unwrap_err().to_string();
    assert!(short.contains("target's page table of group \"full\" has 3 entries but 4"), "{short}");
    let none = link.select(0, cells, &src, &[2, 8, 0, 10]).unwrap_err();
    let expected = RequestError::NoPage {
        side: Side::Target,
        group: "full".into(),
        rank: 0,
        entry: 3,
        page: 10,
        pages: 10,
    };
    assert_eq!(none, expected);
}

#[test]
fn numbers_that_do_not_exist_are_refused() {
    let pairing = pairing();
    let link = pairing.link(1, 1, 0).unwrap();
    assert!(pairing.link(2, 0, 0).is_err() && pairing.link(0, 2, 0).is_err());
    assert!(pairing.sources(2, 0).is_err() && pairing.targets(2, 0).is_err());
    assert!(pairing.group(2).is_err() && pairing.cells(2, 0..1).is_err());
    assert!(link.writes(0, 4, 0..1, &[0], &[0]).is_err());
    assert!(link.expected_of_layer(1, 2, 0..1).is_err() && link.expected(2, 0..1).is_err());
    assert!(link.expected(0, 0..u64::MAX).is_err());
    #[expect(clippy::reversed_empty_ranges)]
    let backwards = link.select(0, 3..1, &[], &[]);
    assert!(backwards.is_err());
}

#[test]
fn the_last_tokens_within_the_window_are_sent() {
    // Pages of 8 at both ends, a window of 20: of 44 tokens 24 to 43 are needed, of 45 tokens 25 to
    // 44.
    let pairing = pairing();
    assert_eq!(pairing.cells(1, 0..44).unwrap(), 3..6);
    assert_eq!(pairing.cells(1, 0..43).unwrap(), 2..6);
    assert_eq!(pairing.cells(1, 0..45).unwrap(), 3..6);
    assert_eq!(pairing.cells(1, 32..45).unwrap(), 4..6);
    assert_eq!(pairing.cells(1, 0..20).unwrap(), 0..3);
    // Without a window all of them, in cells of 8, 4, 4, 8 tokens.
    assert_eq!(pairing.cells(0, 0..44).unwrap(), 0..8);
}

fn in_blocks(page_tokens: u32, block_tokens: Option<u32>) -> [CacheLayout; 1] {
    let (model, form) = sliding();
    let form = Form { page_tokens, block_tokens, ..form };
    [cache(&[(model, form)], |heads| (0, heads))]
}

#[test]
fn of_the_block_that_a_window_begins_in_all_pages_are_sent() {
    // Pages of 8 in blocks of 16, a window of 20: of 44 tokens 24 to 43 are seen.
    let one = in_blocks(8, Some(16));
    let pairing = Pairing::new(&one, &one).unwrap();
    assert_eq!(pairing.cells(0, 0..44).unwrap(), 2..6);
    assert_eq!(pairing.cells(0, 0..51).unwrap(), 2..7);
    assert_eq!(pairing.cells(0, 0..52).unwrap(), 4..7);
    assert_eq!(pairing.cells(0, 24..44).unwrap(), 3..6);
    let pairing = Pairing::new(&in_blocks(8, Some(32)), &one).unwrap();
    assert_eq!(pairing.cells(0, 0..44).unwrap(), 2..6);
}

#[test]
fn a_source_that_gives_back_parts_of_the_blocks_of_a_target_is_refused() {
    let target = in_blocks(8, Some(16));
    for (block, shown) in [(Some(8), "8"), (Some(24), "24"), (None, "none")] {
        let said = Pairing::new(&in_blocks(8, block), &target).unwrap_err().to_string();
        let wanted = format!("block_tokens: {shown} (source rank 0), 16 (target rank 0)");
        assert!(said.contains(&wanted), "{said}");
    }
    let mut ranks = [in_blocks(8, Some(16)), in_blocks(8, Some(32))].concat();
    assert!(Pairing::new(&target, &ranks).is_err(), "ranks of a side are alike");
    for rank in &mut ranks {
        rank.groups[0].window = None;
        rank.groups[0].block_tokens = Some(16);
    }
    let mut smaller = in_blocks(8, Some(8));
    smaller[0].groups[0].window = None;
    Pairing::new(&smaller, &ranks).unwrap();
}

#[test]
fn a_state_is_sent_when_all_tokens_are_computed() {
    let (model, mut form) = full();
    form.page_tokens = 1;
    let one = instance(&[(Model { is_state: true, ..model }, form)], 1);
    let pairing = Pairing::new(&one, &one).unwrap();
    assert_eq!(pairing.cells(0, 0..44).unwrap(), 0..1);
    assert_eq!(pairing.cells(0, 43..44).unwrap(), 0..1);
    assert_eq!([0, 43, 44].map(|done| pairing.ready(0, done, 44).unwrap()), [0, 0, 1]);
    let link = pairing.link(0, 0, 0).unwrap();
    let writes: Vec<_> = link.writes(0, 0, 0..1, &[3], &[1]).unwrap().collect();
    assert_eq!(writes.iter().map(|w| w.nbytes).sum::<u64>(), 2 * 4 * 4, "heads of keys and values");
}

#[test]
fn cells_are_ready_when_all_their_tokens_are_computed() {
    let pairing = pairing();
    // Cells end at 8, 12, 16, 24, 32, 36, 40, 48.
    let ready = |done| pairing.ready(0, done, 44).unwrap();
    assert_eq!([0, 7, 8, 11, 12, 16, 23, 24, 43, 44].map(ready), [0, 0, 1, 1, 2, 3, 3, 4, 7, 8]);
    let chunk = |done| pairing.chunk(0, 12..44, done).unwrap();
    assert_eq!([chunk(0..10), chunk(10..23), chunk(23..44)], [2..2, 2..3, 3..8]);
}
