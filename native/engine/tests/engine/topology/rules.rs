//! User rules, and the errors of rules that don't fit the machine.

use fabric_engine::topology::{pair, pairing_for, Location, Rules};

use super::{paired, shown, trees::machine};

fn refused(rules: &str) -> String {
    let rules = match Rules::parse(rules) {
        Ok(rules) => rules,
        Err(sentence) => return sentence,
    };
    pair(&machine("gb200-nvl72"), &rules).expect_err("a rule that can't be kept")
}

#[test]
fn rules_override_the_automatic_choice() {
    let dgx = machine("dgx-h100");
    let pairing = paired(&dgx, "gpu0=mlx5_7,mlx5_3; host1=mlx5_1; host0 = mlx5_0");
    assert_eq!(shown(&pairing.gpus)[0], "gpu0: mlx5_7 mlx5_3 mixed (SYS)");
    assert_eq!(pairing.gpus[0].reason, "the rule `gpu0=mlx5_7,mlx5_3`");
    assert_eq!(shown(&pairing.gpus)[1], "gpu1: mlx5_3 (PXB)", "other GPUs are unchanged");
    assert_eq!(shown(&pairing.hosts), ["host0: mlx5_0 (NODE)", "host1: mlx5_1 (SYS)"]);
    assert!(!pairing.left_out.iter().any(|l| l.nic == "mlx5_7"), "a used device isn't left out");
}

#[test]
fn rules_match_by_name_pattern_or_address() {
    let gb200 = machine("gb200-nvl72");
    let by = |rule: &str| shown(&paired(&gb200, rule).gpus)[1].clone();
    for place in ["gpu1", "gpu?", "*", "0009:01:00.0", "00000009:01:00.0", "0009:*"] {
        assert_eq!(by(&format!("{place}=mlx5_5")), "gpu1: mlx5_5 (SYS)", "{place}");
    }
    let hosts = shown(&paired(&gb200, "host=mlx5_4").hosts);
    assert_eq!(hosts, ["host0: mlx5_4 (SYS)", "host1: mlx5_4 (NODE)"]);
    let last = by("gpu1=mlx5_5; gpu*=mlx5_0");
    assert_eq!(last, "gpu1: mlx5_0 (NODE)", "of several rules the last counts");
}

#[test]
fn a_nic_assigned_by_a_rule_is_the_last_choice_of_other_gpus() {
    let gpus = shown(&paired(&machine("passthrough-vm"), "gpu7=mlx5_0").gpus);
    let others: Vec<_> = (0..7).map(|i| format!("gpu{i}: mlx5_{} (PHB)", i + 1)).collect();
    assert_eq!(gpus[..7], others);
}

#[test]
fn a_pattern_for_many_takes_the_nearest() {
    let dgx = machine("dgx-h100");
    let pairing = paired(&dgx, "gpu7=mlx5_*; exclude=mlx5_8");
    assert_eq!(shown(&pairing.gpus)[7], "gpu7: mlx5_11 mlx5_6 mlx5_7 mlx5_9 mixed (PXB)");
    let reason = "the nearest 4 of 11 by the rule `gpu7=mlx5_*`";
    assert_eq!(pairing.gpus[7].reason, reason);
}

#[test]
fn an_excluded_device_is_used_only_by_name() {
    let gb200 = machine("gb200-nvl72");
    let gpus = shown(&paired(&gb200, "exclude=mlx5_0,mlx5_1").gpus);
    assert_eq!(gpus[..2], ["gpu0: mlx5_4 (SYS)", "gpu1: mlx5_5 (SYS)"]);
    assert_eq!(gpus[2..], ["gpu2: mlx5_4 (NODE)", "gpu3: mlx5_5 (NODE)"]);
    let named = shown(&paired(&gb200, "exclude=mlx5_0,mlx5_1; gpu0=mlx5_0; gpu1=mlx5_*").gpus);
    assert_eq!(named[0], "gpu0: mlx5_0 (NODE)");
    assert!(!named[1].contains("mlx5_0") && !named[1].contains("mlx5_1"), "{}", named[1]);
}

#[test]
fn a_rule_that_matches_nothing_lists_the_choices() {
    assert_eq!(
        refused("gpu4=mlx5_0"),
        "the rule `gpu4=mlx5_0` matches nothing: there is no `gpu4` here, only gpu0 \
         (0008:01:00.0), gpu1 (0009:01:00.0), gpu2 (0018:01:00.0), gpu3 (0019:01:00.0), host0, host1"
    );
    assert_eq!(
        refused("gpu0=mlx5_0,mlx_1"),
        "the rule `gpu0=mlx5_0,mlx_1` matches nothing: there is no device `mlx_1` here, only \
         mlx5_0, mlx5_1, mlx5_2, mlx5_3, mlx5_4, mlx5_5, mlx5_6, mlx5_7"
    );
    assert!(refused("exclude=mlx5_bond_*").contains("no device `mlx5_bond_*` here"));
    assert!(refused("gpu0=mlx5_*; exclude=mlx5_*").contains("leaves no device for gpu0"));
}

#[test]
fn an_invalid_rule_is_quoted() {
    for (rule, why) in [
        ("mlx5_0", "`mlx5_0` isn't a rule for rails: it has no `=`; write for example"),
        ("gpu0=mlx5_0; =mlx5_1", "`=mlx5_1` isn't a rule for rails: it names no GPU"),
        ("gpu0= , ", "it names no device"),
    ] {
        assert!(refused(rule).contains(why), "{rule}: {}", refused(rule));
    }
    assert_eq!(Rules::parse(" ;; \n"), Ok(Rules::default()));
}

#[test]
fn a_rule_naming_an_unavailable_nic_is_reported() {
    let dgx = machine("dgx-h100");
    let open = ["mlx5_0".to_owned(), "mlx5_3".to_owned()];
    let rules = Rules::parse("gpu0=mlx5_5; exclude=mlx5_4").expect("rules");
    let gpu = |address: &str| Location::Gpu(address.parse().expect("an address"));
    let refused = pairing_for(&dgx, gpu("1b:00.0"), &open, 4, &rules);
    let error = refused.expect_err("mlx5_5 can't be opened");
    assert!(error.contains("`gpu0=mlx5_5` leaves no device for gpu0"), "{error}");
    assert!(error.ends_with("available: mlx5_0, mlx5_3"), "{error}");
}

#[test]
fn the_engine_selects_rails_among_the_nics_it_can_open() {
    let p5 = machine("p5.48xlarge");
    let open: Vec<String> = p5.nics.iter().skip(4).map(|n| n.name.clone()).collect();
    let ask = |location, max| pairing_for(&p5, location, &open, max, &Rules::default());
    let gpu = |address: &str| Location::Gpu(address.parse().expect("an address"));
    let two = ["rdmap96s0", "rdmap98s0"].map(str::to_owned);
    assert_eq!(ask(gpu("00000000:64:00.0"), 2), Ok(two.to_vec()));
    assert_eq!(ask(gpu("64:00.0"), 9).map(|r| r.len()), Ok(4), "four rails are the most");
    assert_eq!(ask(gpu("64:00.0"), 0).map(|r| r.len()), Ok(1), "one rail is the least");
    let borrowed = ["rdmap96s0", "rdmap99s0", "rdmap115s0", "rdmap131s0"].map(str::to_owned);
    assert_eq!(ask(gpu("53:00.0"), 4), Ok(borrowed.to_vec()), "its own four can't be opened");
    assert_eq!(ask(Location::Node(1), 1), Ok(vec!["rdmap147s0".to_owned()]));
    assert_eq!(ask(Location::Host, 4).map(|r| r.len()), Ok(4));
    let missing = ask(gpu("01:00.0"), 4).expect_err("no such GPU");
    assert!(missing.starts_with("there is no GPU at 0000:01:00.0 here, only gpu0 (0000:53:00.0)"));
    let missing = ask(Location::Node(7), 4).expect_err("no such node");
    assert!(missing.starts_with("there is no NUMA node 7 with CPUs here, only"), "{missing}");
    let unknown = ["efa-direct-0".to_owned()];
    let found = pairing_for(&p5, gpu("53:00.0"), &unknown, 4, &Rules::default());
    assert_eq!(found, Ok(unknown.to_vec()), "what sysfs doesn't know is equally near to all");
}
