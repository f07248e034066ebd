//! Every byte of every needed row arrives once, from the right place, and nothing else is touched.

use fabric_kvcache::layout::BufferOffset;
use fabric_kvcache::pairing::Pairing;
use proptest::prelude::*;

use crate::caches::{instance, Form, Head, Layer, Model, Page, Tensor, Token};
use crate::cases;
use crate::replay::{check, fewest, send, Request};
use crate::requests::{choices, instances, request};

/// Keys of page 0 end where its values begin, but of no other page.
#[test]
fn tensors_that_are_neighbours_in_one_page_only_are_sent_apart() {
    let tensors = ["k", "v"].map(|name| (name.to_string(), 1, 4)).to_vec();
    let model =
        Model { name: "full".into(), layers: vec![0], window: None, is_state: false, tensors };
    let mut ranks = instance(&[(model, Form::dense(2, 3, [Layer, Tensor, Page, Head, Token]))], 1);
    ranks[0].buffers[0] = 112;
    let [keys, values] = &mut ranks[0].groups[0].tensors[..] else { unreachable!() };
    (keys.page_stride, values.page_stride) = (16, 48);
    values.places[0] = BufferOffset { buffer: 0, offset: 8 };
    let pairing = Pairing::new(&ranks, &ranks).unwrap();
    let request = Request {
        tokens: 0..6,
        salt: 0,
        src_tables: vec![vec![1, 0, 2]],
        dst_tables: vec![vec![0, 2, 1]],
        chunks: vec![6],
    };
    let memory = send(&pairing, &ranks, &ranks[0], 0, &request);
    check(&memory, &ranks, &ranks[0], &request, std::slice::from_ref(&request.tokens));
    assert_eq!(memory.counted, 6);
}

proptest! {
    #![proptest_config(cases(3000))]

    #[test]
    fn every_needed_byte_arrives_once_and_from_the_right_place(
        of in instances(),
        choices in choices(),
    ) {
        let (source, target) = (of.source(), of.target());
        let pairing = Pairing::new(&source, &target).unwrap();
        let request = request(&of, choices);
        let sent = of.sent(&pairing, &request.tokens);
        for (rank, layout) in target.iter().enumerate() {
            let memory = send(&pairing, &source, layout, rank, &request);
            check(&memory, &source, layout, &request, &sent);
        }
    }

    /// IC-1: the decoder knows what to wait for before anything is sent.
    #[test]
    fn however_a_request_is_chunked_the_target_counts_what_it_expects(
        of in instances(),
        choices in choices(),
    ) {
        let (source, target) = (of.source(), of.target());
        let pairing = Pairing::new(&source, &target).unwrap();
        let request = request(&of, choices);
        for (rank, layout) in target.iter().enumerate() {
            let memory = send(&pairing, &source, layout, rank, &request);
            let expected = pairing.expected(rank, request.salt, request.tokens.clone()).unwrap();
            prop_assert_eq!(memory.counted, expected);
        }
    }

    #[test]
    fn a_cell_takes_as_few_writes_as_it_has_contiguous_runs(
        of in instances(),
        choices in choices(),
    ) {
        let (source, target) = (of.source(), of.target());
        let pairing = Pairing::new(&source, &target).unwrap();
        let request = request(&of, choices);
        let sent = of.sent(&pairing, &request.tokens);
        for (rank, layout) in target.iter().enumerate() {
            let memory = send(&pairing, &source, layout, rank, &request);
            let fewest = fewest(&memory, &pairing, layout, &request, &sent);
            prop_assert_eq!(memory.counted, fewest);
        }
    }
}
