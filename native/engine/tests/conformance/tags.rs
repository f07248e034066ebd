use std::sync::{Arc, Mutex};

use fabric_engine::{
    api::{Imm, TAG_BITS},
    EngineError, Local, Op, Remote, Submit,
};

use crate::worlds::World;

/// IC-2, IC-3 and IC-4 for tags, in any order of arrival.
pub fn each_tag_is_reported_once_with_its_bytes(w: &mut dyn World) {
    const WRITES: u32 = 200;
    let (a, b) = (w.engine("a"), w.engine("b"));
    let (src, dst) = (a.alloc(64 * 256).unwrap(), b.alloc(64 * 256).unwrap());
    let reported: Arc<Mutex<Vec<(u32, u32)>>> = Arc::default();
    let sink = Arc::clone(&reported);
    b.take_tags(move |tag, n| sink.lock().unwrap().push((tag, n))).unwrap();
    let again = b.take_tags(|_, _| ()).unwrap_err();
    assert!(matches!(again, EngineError::Invalid(_)));
    let imported = a.import(&dst.descriptor()).unwrap();
    let tag = |i: u32| (1 << TAG_BITS) - 1 - i * 4099;
    let mut handles = Vec::new();
    for i in 0..WRITES {
        let offset = u64::from(i) * 64;
        src.put(offset, &[i as u8 + 1; 64]).unwrap();
        let (src, dst) = (Local { region: &src, offset }, Remote { region: &imported, offset });
        // Every fourth write carries only its tag.
        let len = if i % 4 == 3 { 0 } else { 64 };
        let op = Op::Write { src, dst, len, imm: Some(Imm::tagged(tag(i)).unwrap()) };
        handles.push(a.submit(&[op], Submit::default()).unwrap());
    }
    let mut seen = vec![0; WRITES as usize];
    w.until("the tags", &mut || {
        b.poll().unwrap();
        handles.iter().for_each(|h| drop(h.drive()));
        for (value, n) in reported.lock().unwrap().drain(..) {
            let i = (0..WRITES).find(|i| tag(*i) == value).expect("a tag that was sent");
            let bytes = dst.get(u64::from(i) * 64, 64).unwrap();
            assert!(i % 4 == 3 || bytes == [i as u8 + 1; 64], "reported before its bytes");
            seen[i as usize] += n;
        }
        handles.iter().all(|h| h.is_done()) && !seen.contains(&0)
    });
    w.idle();
    assert!(reported.lock().unwrap().is_empty());
    assert_eq!(seen, vec![1; WRITES as usize]);
}

pub fn memory_of_another_engine_of_the_process_is_reached_through_either(w: &mut dyn World) {
    let (a, b, c) = (w.engine("a"), w.engine("b"), w.engine("c"));
    let memory = b.alloc(4096).unwrap();
    let part = c.register_again(&memory.slice(1024, 2048).unwrap()).unwrap();
    assert_eq!(part.is_mappable(), memory.is_mappable());
    let src = a.alloc(4096).unwrap();
    src.put(0, &[7; 4096]).unwrap();
    let imported = a.import(&part.descriptor()).unwrap();
    let (local, remote) =
        (Local { region: &src, offset: 0 }, Remote { region: &imported, offset: 512 });
    let op = Op::Write { src: local, dst: remote, len: 1536, imm: None };
    let handle = a.submit(&[op], Submit::default()).unwrap();
    assert_eq!(w.wait(&handle), Ok(()));
    assert_eq!(memory.get(1024 + 512, 1536).unwrap(), [7; 1536]);
    assert_eq!(memory.get(0, 1024 + 512).unwrap(), [0; 1536]);
    drop(memory);
    assert_eq!(part.get(2047, 1).unwrap(), [7]);
}
