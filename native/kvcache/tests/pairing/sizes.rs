//! A transfer is described by strides and indices, whatever its size, and quickly.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::Instant;

use fabric_kvcache::pairing::{PagedWrite, Pairing};

use crate::caches::{instance, Form, Head, Layer, Model, Page, Tensor, Token};

thread_local! {
    static LIVE: Cell<i64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: everything is the system allocator's; the bytes in use are counted beside it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = LIVE.try_with(|n| n.set(n.get() + layout.size() as i64));
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        let _ = LIVE.try_with(|n| n.set(n.get() - layout.size() as i64));
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// What `make` leaves allocated by this thread.
fn kept<T>(make: impl FnOnce() -> T) -> (T, i64) {
    let before = LIVE.with(Cell::get);
    let made = make();
    (made, LIVE.with(Cell::get) - before)
}

/// A request's pages, in no order.
fn table(pages: u32, seed: u64) -> Vec<u32> {
    let mut table: Vec<u32> = (0..pages).collect();
    fastrand::Rng::with_seed(seed).shuffle(&mut table);
    table
}

fn model(layers: u32, heads: u32, width: u32) -> Model {
    let tensors = ["k", "v"].map(|name| (name.to_string(), heads, width)).to_vec();
    Model {
        name: "full".into(),
        layers: (0..layers).collect(),
        window: None,
        is_state: false,
        tensors,
    }
}

/// Pain 20: 61 layers, 32 runs of each page, 513 pages: a million writes of a page.
#[test]
fn a_million_page_writes_take_less_than_16_kb() {
    let pages = 513;
    let model = model(61, 16, 256);
    // Heads first at the source, tokens first at the target: nothing joins but a head's tokens.
    let source = Form::dense(16, pages, [Layer, Tensor, Head, Page, Token]);
    let target = Form::dense(16, pages, [Layer, Page, Tensor, Head, Token]);
    let source = instance(&[(model.clone(), source)], 1);
    let target = instance(&[(model, target)], 1);
    let (src, dst) = (table(pages, 1), table(pages, 2));
    let ((_, selection), bytes) = kept(|| {
        let pairing = Pairing::new(&source, &target).unwrap();
        let link = pairing.link(0, 0, 0).unwrap();
        let cells = pairing.cells(0, 0..16 * u64::from(pages)).unwrap();
        (pairing, link.select(0, cells, &src, &dst).unwrap())
    });
    let count = |layer| selection.writes(layer).unwrap().map(|w| w.count()).sum::<u64>();
    let writes: u64 = (0..61).map(count).sum();
    assert_eq!(writes, 61 * 32 * 513);
    assert!(bytes < 16 << 10, "{bytes} bytes for {writes} writes");
}

#[test]
fn a_description_does_not_grow_with_the_number_of_pages_but_for_two_lists() {
    let described = |pages: u32, source_page: u32| {
        let form = |tokens, pages| Form::dense(tokens, pages, [Layer, Page, Token, Tensor, Head]);
        let pages_there = pages * source_page / 16;
        let source = instance(&[(model(4, 2, 8), form(source_page, pages))], 1);
        let target = instance(&[(model(4, 2, 8), form(16, pages_there))], 1);
        let (src, dst) = (table(pages, 1), table(pages_there, 2));
        let pairing = Pairing::new(&source, &target).unwrap();
        let link = pairing.link(0, 0, 0).unwrap();
        let cells = pairing.cells(0, 0..u64::from(pages * source_page)).unwrap();
        let (_selection, bytes) = kept(|| link.select(0, cells, &src, &dst).unwrap());
        bytes
    };
    assert_eq!(described(2000, 16) - described(1000, 16), 1000 * (4 + 4));
    // Cells are as small as the smaller pages; a larger page is listed once for all of its cells.
    assert_eq!(described(2000, 64) - described(1000, 64), 1000 * (4 + 4 * 4));
}

#[test]
fn pages_that_follow_each_other_need_no_list() {
    let form = Form::dense(16, 1000, [Layer, Page, Token, Tensor, Head]);
    let ranks = instance(&[(model(1, 2, 8), form)], 1);
    let pairing = Pairing::new(&ranks, &ranks).unwrap();
    let link = pairing.link(0, 0, 0).unwrap();
    let pages: Vec<u32> = (0..1000).collect();
    let writes: Vec<PagedWrite> = link.writes(0, 0, 0..1000, &pages, &pages).unwrap().collect();
    assert_eq!(writes.len(), 1, "keys and values of all heads lie side by side");
    assert!(writes[0].src_pages.list().is_none() && writes[0].dst_pages.list().is_none());
}

/// Layers whose tensors lie each in another way to each other share one form, though less joins.
#[test]
fn layers_that_all_differ_do_not_multiply_what_is_kept() {
    let layers = 40;
    let model = model(layers, 64, 1);
    let form = Form::dense(256, 1, [Layer, Page, Head, Token, Tensor]);
    let mut ranks = instance(&[(model, form)], 1);
    let tensors = &mut ranks[0].groups[0].tensors;
    for (t, tensor) in tensors.iter_mut().enumerate() {
        (tensor.head_stride, tensor.token_stride) = (256 * 64, 64);
        for (layer, place) in tensor.places.iter_mut().enumerate() {
            // Values lie 1 byte behind keys in the first layer, 2 in the second and so on.
            place.offset = (layer << 21) as u64 + (t * (layer + 1)) as u64;
        }
    }
    ranks[0].buffers[0] = u64::from(layers) << 21;
    let pairing = Pairing::new(&ranks, &ranks).unwrap();
    let (link, bytes) = kept(|| pairing.link(0, 0, 0).unwrap());
    let runs = 2 * 64 * 256;
    assert_eq!(link.expected(0, 0..1).unwrap(), u64::from(layers) * runs);
    assert!(bytes < 40 * runs as i64, "{bytes} bytes for {runs} runs");
}

#[test]
fn links_of_other_requests_share_their_runs() {
    let form = Form::dense(16, 10, [Layer, Page, Tensor, Token, Head]);
    let pairing = |ranks| instance(&[(model(2, 8, 1), form.clone())], ranks);
    let pairing = Pairing::new(&pairing(1), &pairing(2)).unwrap();
    let (first, made) = kept(|| pairing.link(0, 0, 1).unwrap());
    let (other, shared) = kept(|| pairing.link(0, 0, 2).unwrap());
    assert_eq!(first.expected(0, 0..1), other.expected(0, 0..1));
    assert!(made > 32 * 16 && shared < 32, "{made} bytes, then {shared}");
}

/// Prints how long it takes; `cargo test --release -- --ignored --nocapture` shows it.
#[test]
#[ignore = "prints times to look at; they depend on the machine, so none of them can fail"]
fn how_long_descriptions_take() {
    let time = |what: &str, mut f: Box<dyn FnMut()>| {
        f();
        let start = Instant::now();
        (0..100).for_each(|_| f());
        println!("{what}: {:?}", start.elapsed() / 100);
    };
    let pages = 10_000;
    let form = |order| Form::dense(16, pages, order);
    let source = form([Layer, Tensor, Page, Token, Head]);
    let target = form([Layer, Page, Tensor, Head, Token]);
    let source = instance(&[(model(61, 8, 256), source)], 8);
    let target = instance(&[(model(61, 8, 256), target)], 4);
    let (src, dst) = (table(pages, 1), table(pages, 2));
    let pairing = Pairing::new(&source, &target).unwrap();
    let cells = pairing.cells(0, 0..16 * u64::from(pages)).unwrap();
    let link = pairing.link(0, 0, 0).unwrap();
    let layers = link.select(0, cells.clone(), &src, &dst).unwrap();
    let (s, t) = (source.clone(), target.clone());
    let interleaved = instance(&[(model(61, 8, 256), form([Page, Layer, Tensor, Head, Token]))], 8);
    let check = move || interleaved.iter().for_each(|layout| layout.check().unwrap());
    time("checking 8 ranks whose pages hold all layers", Box::new(check));
    let new = move || Pairing::new(&s, &t).unwrap();
    let fresh = new.clone();
    time("pairing of 8 ranks with 4", Box::new(move || drop(new())));
    let first = move || drop(fresh().link(0, 0, 0).unwrap());
    time("the same and the first link", Box::new(first));
    time("a link again", Box::new(move || drop(pairing.link(0, 0, 0).unwrap())));
    let select = move || drop(link.select(0, cells.clone(), &src, &dst).unwrap());
    time("selecting 10,000 pages", Box::new(select));
    let one =
        move || assert_eq!(layers.writes(3).unwrap().map(|w| w.count()).sum::<u64>() % 10_000, 0);
    time("the writes of a layer of 10,000 pages", Box::new(one));
}
