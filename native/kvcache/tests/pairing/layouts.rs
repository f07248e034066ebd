//! A layout that passes its check can be true; one that doesn't says where and why.

use std::collections::HashSet;

use fabric_kvcache::layout::{BufferOffset, CacheGroup, CacheLayout, CacheTensor, LayoutProblem};
use fabric_kvcache::pairing::Pairing;
use proptest::prelude::*;

use crate::caches::{instance, Form, Head, Layer, Model, Page, Tensor, Token};
use crate::cases;
use crate::requests::instances;

/// Keys and values of 2 layers, 4 pages, 2 heads, 8 tokens, 4 bytes a row.
fn plain() -> CacheLayout {
    let tensors = ["k", "v"].map(|name| (name.to_string(), 2, 4)).to_vec();
    let model =
        Model { name: "full".into(), layers: vec![0, 5], window: None, is_state: false, tensors };
    let form = Form::dense(8, 4, [Layer, Tensor, Page, Head, Token]);
    instance(&[(model, form)], 1).remove(0)
}

/// What is said of the plain layout after a change.
fn problem(change: impl FnOnce(&mut CacheLayout)) -> String {
    let mut layout = plain();
    change(&mut layout);
    layout.check().unwrap_err().to_string()
}

fn group(change: impl FnOnce(&mut CacheGroup)) -> String {
    problem(|l| change(&mut l.groups[0]))
}

fn value(change: impl FnOnce(&mut CacheTensor)) -> String {
    problem(|l| change(&mut l.groups[0].tensors[1]))
}

#[track_caller]
fn says(said: String, parts: &[&str]) {
    for part in parts {
        assert!(said.contains(part), "{said:?} doesn't say {part:?}");
    }
}

#[test]
fn a_plain_layout_passes() {
    plain().check().unwrap();
}

#[test]
fn problems_are_named_with_their_place() {
    let tensor = "group \"full\", tensor \"v\"";
    says(problem(|l| l.groups.clear()), &["there are no groups"]);
    says(problem(|l| l.groups.push(l.groups[0].clone())), &["layer \"0\" appears twice"]);
    says(problem(|l| l.buffers[0] = 1 << 50), &["bytes of a buffer", "limit"]);
    says(problem(|l| l.model = "m".repeat(5000)), &["model", "4096"]);
    says(group(|g| g.layers.clear()), &["group \"full\"", "no layers"]);
    says(group(|g| g.layers = vec![5, 5]), &["layer \"5\" appears twice"]);
    says(group(|g| g.tensors.clear()), &["no tensors"]);
    says(group(|g| g.page_tokens = 0), &["tokens of a page is zero"]);
    says(group(|g| g.page_tokens = 1 << 17), &["tokens of a page", "65536"]);
    says(group(|g| g.pages = 0), &["number of pages is zero"]);
    says(group(|g| g.window = Some(0)), &["window is zero"]);
    says(group(|g| g.block_tokens = Some(0)), &["tokens of a block is zero"]);
    says(group(|g| g.block_tokens = Some(3)), &["blocks of 3 tokens", "pages of 8"]);
    says(group(|g| g.is_state = true), &["counts as one token"]);
    says(group(|g| g.tensors[1].name = "k".into()), &["\"k\" appears twice"]);
    says(value(|t| t.heads = 0), &[tensor, "heads is zero"]);
    says(value(|t| t.held_heads = 0), &[tensor, "held heads is zero"]);
    says(value(|t| t.first_head = 1), &[tensor, "heads 1 to 1+2", "model's 2"]);
    says(value(|t| t.first_head = u32::MAX), &[tensor, "model's 2"]);
    says(value(|t| t.width = 0), &[tensor, "width is zero"]);
    says(value(|t| t.dtype = "int4".into()), &[tensor, "\"int4\"", "uint8"]);
    says(value(|t| t.places.truncate(1)), &[tensor, "1 places for 2 layers"]);
    says(value(|t| t.places[1].buffer = 1), &[tensor, "layer 5", "buffer 1 isn't among the 1"]);
    says(value(|t| t.places[1].offset += 1), &[tensor, "layer 5", "byte 1025 of a buffer of 1024"]);
    says(value(|t| t.places[0].offset = u64::MAX), &["layer 0", "2^64 or beyond"]);
    says(value(|t| t.page_stride = u64::MAX / 2), &["layer 0", "2^64 or beyond"]);
    says(value(|t| t.token_stride = 3), &[tensor, "tokens overlap", "3 bytes apart", "take 4"]);
    says(value(|t| t.head_stride = 31), &[tensor, "heads overlap", "31 bytes apart", "take 32"]);
    says(value(|t| t.page_stride = 0), &[tensor, "pages overlap"]);
    let shared = value(|t| t.places[1].offset -= 1);
    says(shared, &["group \"full\"", "layer 5", "shares bytes", "tensor \"v\""]);
    says(value(|t| t.places[1].offset = 0), &["shares bytes", "layer 0", "layer 5"]);
}

#[test]
fn strides_of_what_there_is_one_of_mean_nothing() {
    let mut layout = plain();
    for tensor in &mut layout.groups[0].tensors {
        (tensor.heads, tensor.held_heads, tensor.head_stride) = (1, 1, u64::MAX);
    }
    layout.check().unwrap();
    let pairing = Pairing::new(&[layout.clone()], &[layout]).unwrap();
    let link = pairing.link(0, 0, 0).unwrap();
    assert_eq!(link.writes(0, 1, 0..2, &[3, 0], &[1, 2]).unwrap().count(), 2);
}

#[test]
fn groups_may_lend_each_other_memory() {
    let mut layout = plain();
    layout.groups.push(CacheGroup { name: "sliding".into(), ..layout.groups[0].clone() });
    layout.check().unwrap();
}

#[test]
fn a_layout_reads_as_python_writes_it() {
    let layout = plain();
    let named = rmp_serde::to_vec_named(&layout).unwrap();
    assert_eq!(rmp_serde::from_slice::<CacheLayout>(&named).unwrap(), layout);
}

/// Every byte of every row of one tensor in one layer.
fn bytes(group: &CacheGroup, tensor: &CacheTensor, layer: usize) -> Vec<(u32, u64)> {
    let BufferOffset { buffer, offset } = tensor.places[layer];
    let mut all = Vec::new();
    for page in 0..u64::from(group.pages) {
        for head in 0..u64::from(tensor.held_heads) {
            for token in 0..u64::from(group.page_tokens) {
                let row = page * tensor.page_stride + head * tensor.head_stride;
                let row = offset + row + token * tensor.token_stride;
                all.extend((row..row + tensor.row_bytes().unwrap()).map(|at| (buffer, at)));
            }
        }
    }
    all
}

/// Two tensors of equal strides, of any length, somewhere near each other.
fn neighbours() -> impl Strategy<Value = CacheLayout> {
    let strides = (0u64..40, 0u64..40, 0u64..40);
    let counts = (1u32..4, 1u32..4, 1u32..4);
    let tensor =
        |width: u32, offset: u64, (page, head, token): (u64, u64, u64), heads: u32| CacheTensor {
            name: format!("{width}"),
            heads,
            first_head: 0,
            held_heads: heads,
            width,
            dtype: "int8".into(),
            page_stride: page,
            head_stride: head,
            token_stride: token,
            places: vec![
                BufferOffset { buffer: 0, offset },
                BufferOffset { buffer: 0, offset: offset + 37 },
            ],
        };
    (strides, counts, 1u32..5, 5u32..8, 0u64..60, 0u64..60).prop_map(
        move |(strides, (pages, heads, tokens), width, other, at, there)| CacheLayout {
            model: "m".into(),
            buffers: vec![200],
            is_stage: false,
            groups: vec![CacheGroup {
                name: "g".into(),
                layers: vec![0, 1],
                page_tokens: tokens,
                is_state: false,
                block_tokens: None,
                pages,
                window: None,
                tensors: vec![
                    tensor(width, at, strides, heads),
                    tensor(other, there, strides, heads),
                ],
            }],
        },
    )
}

proptest! {
    #![proptest_config(cases(20_000))]

    #[test]
    fn what_passes_has_no_byte_twice_and_none_outside(layout in neighbours()) {
        let group = &layout.groups[0];
        let every = group.tensors.iter().flat_map(|t| (0..2).map(move |l| (t, l)));
        let all: Vec<(u32, u64)> = every.flat_map(|(t, l)| bytes(group, t, l)).collect();
        let alone = all.iter().collect::<HashSet<_>>().len() == all.len();
        let inside = all.iter().all(|&(_, at)| at < 200);
        match layout.check().map_err(|e| e.problem) {
            Ok(()) => prop_assert!(alone && inside),
            Err(LayoutProblem::Shared { .. }) => prop_assert!(!alone),
            Err(LayoutProblem::Outside { .. }) => prop_assert!(!inside),
            // Refused as well: rows that are apart although a stride doesn't step over the smaller
            // ones.
            Err(problem) => prop_assert!(matches!(problem, LayoutProblem::Overlap { .. }), "{problem}"),
        }
    }
}

/// Where strides differ only what begins at one byte is known to be shared.
#[test]
fn tensors_of_different_strides_that_interleave_pass() {
    let mut layout = plain();
    let group = &mut layout.groups[0];
    (group.pages, group.page_tokens, group.layers) = (1, 2, vec![0]);
    // Keys lie at 0, 4, 20 and 24, values at 16, 22, 36 and 42: not at 20 - 4.
    for (tensor, (token_stride, offset)) in group.tensors.iter_mut().zip([(4, 0), (6, 16)]) {
        (tensor.width, tensor.head_stride, tensor.token_stride) = (1, 20, token_stride);
        tensor.places = vec![BufferOffset { buffer: 0, offset }];
    }
    layout.check().unwrap();
    layout.groups[0].tensors[1].places[0].offset = 0;
    assert!(matches!(layout.check().unwrap_err().problem, LayoutProblem::Shared { .. }));
}

/// Uses everything of a layout that a peer sent.
fn use_it(layout: &CacheLayout, tokens: u64, salt: u64) {
    if layout.check().is_err() {
        return;
    }
    let target = std::slice::from_ref(layout);
    let Ok(pairing) = Pairing::new(&[layout.clone(), layout.clone()], target) else {
        return;
    };
    let _ = pairing.expected(0, salt, 0..tokens);
    for group in 0..pairing.groups() {
        let Ok(cells) = pairing.cells(group, 0..tokens) else { continue };
        let Ok(link) = pairing.link(0, 0, salt) else { continue };
        let _ = pairing.ready(group, tokens / 2, tokens);
        let near = cells.start..cells.end.min(cells.start + 100);
        if let Ok(writes) = link.writes(group, 0, near, &[0; 100], &[0; 100]) {
            let _ = writes.count();
        }
    }
}

/// Numbers that are likely to matter.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![3 => 0u64..5, 1 => Just(u64::MAX), 1 => Just(u32::MAX.into()), 1 => any::<u64>()]
}

proptest! {
    #![proptest_config(cases(2000))]

    #[test]
    fn damaged_layouts_never_panic(
        of in instances(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        tokens in number(),
        salt in any::<u64>(),
    ) {
        let mut bytes = rmp_serde::to_vec(&of.source()[0]).unwrap();
        for (at, value) in damage {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Ok(layout) = rmp_serde::from_slice::<CacheLayout>(&bytes) {
            use_it(&layout, tokens, salt);
        }
    }

    #[test]
    fn any_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..60)) {
        if let Ok(layout) = rmp_serde::from_slice::<CacheLayout>(&bytes) {
            use_it(&layout, 10, 0);
        }
    }

    #[test]
    fn any_numbers_never_panic(
        of in instances(),
        changes in prop::collection::vec((0usize..13, number()), 1..4),
        tokens in number(),
        salt in any::<u64>(),
    ) {
        let mut layout = of.source().remove(0);
        for (field, n) in changes {
            let group = &mut layout.groups[0];
            let tensor = &mut group.tensors[0];
            match field {
                0 => group.page_tokens = n as u32,
                1 => group.pages = n as u32,
                2 => group.window = Some(n as u32),
                3 => tensor.heads = n as u32,
                4 => tensor.first_head = n as u32,
                5 => tensor.held_heads = n as u32,
                6 => tensor.width = n as u32,
                7 => tensor.page_stride = n,
                8 => tensor.head_stride = n,
                9 => tensor.token_stride = n,
                10 => tensor.places[0].offset = n,
                11 => group.block_tokens = Some(n as u32),
                _ => layout.buffers.iter_mut().for_each(|len| *len = n),
            }
        }
        use_it(&layout, tokens, salt);
    }
}
