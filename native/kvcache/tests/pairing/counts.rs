//! How many writes the caches of well-known engines take.

use fabric_kvcache::pairing::Pairing;

use crate::caches::{instance, Dim, Form, Head, Layer, Model, Page, Tensor, Token};

/// Writes of a page for each layer and each 64 tokens that a target rank waits for, over all links.
fn writes(tensors: &[(&str, u32, u32)], source: (u32, Form), target: (u32, Form)) -> u64 {
    let tensors = tensors.iter().map(|&(name, heads, width)| (name.into(), heads, width)).collect();
    let model =
        Model { name: "full".into(), layers: vec![0], window: None, is_state: false, tensors };
    let side = |(ranks, form): (u32, Form)| instance(&[(model.clone(), form)], ranks);
    let pairing = Pairing::new(&side(source), &side(target)).unwrap();
    pairing.expected(0, 0, 0..64).unwrap()
}

const KV: [(&str, u32, u32); 2] = [("k", 8, 256), ("v", 8, 256)];
const LATENT: [(&str, u32, u32); 2] = [("latent", 1, 1024), ("rope", 1, 128)];

/// vLLM's FlashAttention: keys and values in halves.
const HALVES: [Dim; 5] = [Layer, Tensor, Page, Token, Head];
/// vLLM's FlashInfer with heads first: keys and values in one page.
const HEADS_FIRST: [Dim; 5] = [Layer, Page, Tensor, Head, Token];
const TOKENS_FIRST: [Dim; 5] = [Layer, Page, Tensor, Token, Head];

fn pages(tokens: u32, order: [Dim; 5]) -> Form {
    Form::dense(tokens, 16, order)
}

#[test]
fn equal_instances_send_whole_pages() {
    let same = |order| writes(&KV, (4, pages(16, order)), (4, pages(16, order)));
    assert_eq!(same(HEADS_FIRST), 4, "a page of keys and values each");
    assert_eq!(same(TOKENS_FIRST), 4);
    assert_eq!(same(HALVES), 8, "a page of keys and one of values each");
}

#[test]
fn a_latent_page_is_one_write_when_its_parts_lie_side_by_side() {
    let order = [Layer, Page, Head, Token, Tensor];
    assert_eq!(writes(&LATENT, (8, pages(64, order)), (2, pages(64, order))), 1);
}

#[test]
fn heads_first_takes_one_write_of_keys_and_one_of_values_for_each_other_rank() {
    // 2 heads here for 1 there, and the other way round.
    assert_eq!(writes(&KV, (4, pages(16, HEADS_FIRST)), (8, pages(16, HEADS_FIRST))), 4 * 2);
    assert_eq!(writes(&KV, (2, pages(16, HEADS_FIRST)), (4, pages(16, HEADS_FIRST))), 4 * 2);
    assert_eq!(writes(&KV, (8, pages(16, HEADS_FIRST)), (4, pages(16, HEADS_FIRST))), 4 * 2 * 2);
}

#[test]
fn tokens_first_takes_a_write_for_each_token_where_heads_are_cut() {
    assert_eq!(writes(&KV, (2, pages(16, TOKENS_FIRST)), (4, pages(16, TOKENS_FIRST))), 64 * 2);
    let other = writes(&KV, (4, pages(16, TOKENS_FIRST)), (4, pages(16, HEADS_FIRST)));
    // But the last row of a page's keys and the first of its values are neighbours in either order.
    assert_eq!(other, 64 * 2 * 2 - 4, "and for each head where the orders differ");
}

#[test]
fn a_larger_page_takes_as_many_writes_as_the_smaller_ones_that_fill_it() {
    assert_eq!(writes(&KV, (4, pages(64, HALVES)), (4, pages(16, HALVES))), 8);
    assert_eq!(writes(&KV, (4, pages(16, HALVES)), (4, pages(64, HALVES))), 8);
    // Pages of 24 and of 16 tokens end at 16, 24, 32, 48 and, of 64 tokens, at 64.
    assert_eq!(writes(&KV, (4, pages(24, HALVES)), (4, pages(16, HALVES))), 5 * 2);
}
