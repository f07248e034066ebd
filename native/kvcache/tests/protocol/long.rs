//! Prompts whose messages no engine carries in one piece.

use fabric_engine::api::TransportKind;
use fabric_kvcache::{Event, JobEvent, Pull};

use crate::{
    cache::Shape,
    plain::{asked, until},
    world::{ask, engines_over, Cut, DecodeNode, PrefillNode},
};

#[test]
fn a_prompt_of_200_000_tokens_is_asked_for_over_any_link() {
    const TOKENS: u64 = 200_000;
    let shape = Shape { layers: 1, heads: 1, width: 8, window: None };
    let cut = Cut { page_tokens: 16, pages: 12_500 };
    // In no order, as in a cache that has been used for long; five bytes of the prompt for each
    // token.
    let table: Vec<u32> = (0..12_500).map(|i| i * 7_919 % 12_500).collect();
    let payload: Vec<u8> = (0..5 * TOKENS).map(|i| (i % 251) as u8).collect();
    for kind in [TransportKind::Shm, TransportKind::Tcp] {
        let (p, d) = (engines_over(&[kind], 1, "prefill"), engines_over(&[kind], 1, "decode"));
        let prefill = PrefillNode::new(&p, &shape, cut).unwrap();
        let decode = DecodeNode::new(&d, &shape, cut).unwrap();
        assert!(payload.len() > 10 * d[0].max_message(), "it goes in parts");
        let to = decode.decoder.connect(&prefill.prefiller.offer()).unwrap();
        let request = Pull { payload: payload.clone(), ..ask(TOKENS, 0, table.clone(), 0) };
        let seq = decode.decoder.request(to, request).unwrap();
        let job = asked(&prefill, 0);
        let came = prefill.events.lock().iter().find_map(|(_, event)| match event {
            JobEvent::Requested(asked) => Some(asked.payload.clone()),
            _ => None,
        });
        assert!(came.as_ref() == Some(&payload), "the payload is not what was sent over {kind}");
        prefill.prefiller.accept(job, vec![table.clone()], 0).unwrap();
        prefill.pass(job, 5, 0..TOKENS, &table);
        prefill.tail(job, 5).unwrap();
        until("the end", || (decode.events(seq).len() == 2).then_some(()));
        assert_eq!(decode.events(seq), [Event::Ready, Event::Released]);
        decode.caches[0].holds(5, 0..TOKENS, &table).unwrap();
    }
}
