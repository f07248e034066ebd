//! Two layouts as they come from Python: each pair is refused or planned.
#![no_main]

use fabric_plan::{plan, Extra, Options, Plan, Role, Side, SideSpec};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Some((&[low, high], rest)) = bytes.split_first_chunk::<2>() else { return };
    let at = usize::from(u16::from_le_bytes([low, high])).min(rest.len());
    let side = |role, bytes: &[u8]| Side::from_spec(role, SideSpec::from_msgpack(role, bytes)?);
    let Ok(source) = side(Role::Source, &rest[..at]) else { return };
    let Ok(target) = side(Role::Target, &rest[at..]) else { return };
    let options = Options { extra: Extra::Ignore, min_split_bytes: 1 };
    let Ok(planned) = plan(source, target, options) else { return };
    let again = Plan::from_bytes(&planned.to_bytes()).expect("what is encoded must decode");
    assert_eq!(again, planned);
});
