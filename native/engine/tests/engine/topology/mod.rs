//! Topology and pairing, on recorded machines (`trees/`) and on small made-up ones.

mod machines;
mod rules;
mod shapes;
mod trees;

use fabric_engine::topology::{pair, Pairing, RailChoice, Rules, Topology};

/// The pairing of a machine under rules that are known to match.
fn paired(topology: &Topology, rules: &str) -> Pairing {
    let rules = Rules::parse(rules).expect("rules");
    pair(topology, &rules).expect("rules that match")
}

/// `gpu0: mlx5_0 mlx5_1 (PIX)` for each GPU or host.
fn shown(choices: &[RailChoice]) -> Vec<String> {
    let line = |choice: &RailChoice| {
        let mut line = format!("{}:", choice.name);
        for rail in &choice.rails {
            line += &format!(" {}", rail.nic);
        }
        if let Some(first) = choice.rails.first() {
            let same = choice.rails.iter().all(|r| r.distance.code() == first.distance.code());
            line += if same { "" } else { " mixed" };
            line += &format!(" ({})", first.distance.code());
        }
        line
    };
    choices.iter().map(line).collect()
}

fn reason_for(pairing: &Pairing, nic: &str) -> String {
    let found = pairing.left_out.iter().find(|l| l.nic == nic);
    found.unwrap_or_else(|| panic!("{nic} is not left out: {pairing:?}")).reason.clone()
}
